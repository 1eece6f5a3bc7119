"""The work lists of the gated delta rule's Triton kernels: chunks, merges, reads, integers only.

A chunk is PAIR_CHUNK consecutive positions of one document, aligned to that document's position 0.
A tree node is a pair, transition and state, of whole chunks. A node that is a left child is stored
by the chunk that it ends at (chunk c reads the nodes e = c, c & (c-1), ... of its document), one
that is a right child by the chunk that it begins at, so that two slots for each chunk hold the
whole tree and the two children of a merge carry the same number: that of the chunk between them.
A document that begins in a later chunk than 0 (its past is a state) has no nodes before that
chunk; where one side of a merge would be empty, the node of the other side stands for both.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.host_tables import on_device, to_last

PAIR_CHUNK = 64
READERS_PER_SUM = 32
"""Chunks that one program of the node gradient reads at most: bounds the longest program."""


@dataclass(frozen=True)
class PairPlan:
    """Tables on the device, int32, for documents laid end to end; n numbers chunks over all.

    chunks [num_chunks, 7]: first token, tokens in it, its index c in the document, nodes it reads,
        first and last chunk of its document (as indices in the document), first of its rows.
        A chunk has one row of carried queries for each node it reads, and one more with `far`.
    merges [nodes, 4], by level, lowest first: n of the chunk between the children, n of the chunk
        that the parent ends at, whether the parent is a left child, n of its slot.
    reads [reads, 4], by level of the node, lowest first, then by chunk: n of the reader, n of the
        node, row of the query, whether a farther node (or `far`) follows.
    sums [items, 4]: a node's gradient, at most READERS_PER_SUM of its readers: n of the node, first
        of the reads, how many, and where the sum goes: -1 for the node, else a partial slot.
    splits [nodes, 3]: nodes with several items: n, first partial slot, partials.
    slots [tokens] int64, with `far`: 64 times its chunk plus its place there, for every token.
    merge_levels, read_levels: begin and end in `merges` and `reads` of levels 0, 1, ...
    """

    num_chunks: int
    num_rows: int
    num_partials: int
    chunks: Tensor
    merges: Tensor
    reads: Tensor
    sums: Tensor
    splits: Tensor
    slots: Tensor
    merge_levels: tuple[tuple[int, int], ...]
    read_levels: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def pair_plan(
    lengths: tuple[int, ...], first_chunks: tuple[int, ...], far: bool, device: torch.device
) -> PairPlan:
    """The plan for documents of these lengths that begin at chunk `first_chunks` of their own.

    far: queries are carried on, past the farthest node, to the document's first token.
    """
    return to_last(lambda: _pair_plan(lengths, first_chunks, far, device))


def pair_chunks(B: int, T: int, cu_seqlens: Tensor | None) -> int:
    """Chunks to make room for, known from shapes alone: at least the plan's."""
    if cu_seqlens is None:
        return B * (-(-T // PAIR_CHUNK))
    return T // PAIR_CHUNK + cu_seqlens.shape[0] - 1


def _pair_plan(
    lengths: tuple[int, ...], first_chunks: tuple[int, ...], far: bool, device: torch.device
) -> PairPlan:
    length = torch.tensor(lengths)
    counts = -(-length // PAIR_CHUNK)
    begin = counts.cumsum(0) - counts
    token = length.cumsum(0) - length

    def of_chunk(x: Tensor) -> Tensor:
        return x.repeat_interleave(counts)

    n = torch.arange(int(counts.sum()))
    first = of_chunk(torch.tensor(first_chunks))
    inside = n - of_chunk(begin)  # chunks of the document before this one
    c, last = first + inside, first + of_chunk(counts) - 1
    levels = int(last.max()).bit_length()

    reading = []  # by level: chunks that read a node of it
    read_count = torch.zeros_like(n)
    for j in range(levels):
        reading.append(((c >> j) & 1 == 1) & (c >> j << j > first))
        read_count += reading[-1]
    rows = read_count + int(far)
    row = rows.cumsum(0) - rows
    columns = [of_chunk(token) + inside * PAIR_CHUNK]
    columns += [(of_chunk(length) - inside * PAIR_CHUNK).clamp(max=PAIR_CHUNK), c, read_count]
    chunks = torch.stack([*columns, first, last, row], dim=1)

    merges, reads, sums, splits = [], [], [], []
    partials = read_base = 0
    read_so_far = torch.zeros_like(n)
    for j, readers in enumerate(reading):
        size = 1 << j
        ends = (c & (2 * size - 1) == size) & (c > first)  # a node of this level ends here
        between = n[ends & (c + size <= last)]
        e, end = c[between], between + size
        left = (e & (2 * size) == 0) | (e - size <= first[between])
        # The parent ends at e + size; e has bit j, so it is a left child where bit j + 1 is clear.
        merges.append(
            torch.stack([between, end, left.long(), torch.where(left, end, between - size)], 1)
        )

        node = n - (c & (size - 1))
        follows = (read_so_far + 1 < read_count) | far
        table = torch.stack([n, node, row + read_so_far, follows.long()], dim=1)
        reads.append(table[readers])
        read_so_far += readers

        position = readers.cumsum(0) - 1 + read_base
        read_base += len(reads[-1])
        nodes = n[ends]
        count = (last[nodes] + 1 - c[nodes]).clamp(max=size)
        parts = -(-count // READERS_PER_SUM)
        of_node = torch.arange(len(nodes)).repeat_interleave(parts)
        part = torch.arange(len(of_node)) - (parts.cumsum(0) - parts)[of_node]
        several = parts > 1
        slots = torch.where(several, parts, 0)
        first_slot = slots.cumsum(0) - slots + partials
        partials += int(slots.sum())
        target = torch.where(several[of_node], first_slot[of_node] + part, -1)
        here = (count[of_node] - part * READERS_PER_SUM).clamp(max=READERS_PER_SUM)
        starts = position[nodes][of_node] + part * READERS_PER_SUM
        sums.append(torch.stack([nodes[of_node], starts, here, target], dim=1))
        splits.append(torch.stack([nodes, first_slot, parts], dim=1)[several])

    items = _rows(sums, 4)
    items = items[items[:, 2].argsort(descending=True, stable=True)]  # the longest first

    def put(x: Tensor) -> Tensor:
        return on_device(x.to(torch.int32).contiguous(), device)

    return PairPlan(
        num_chunks=len(n),
        num_rows=int(rows.sum()),
        num_partials=partials,
        chunks=put(chunks),
        merges=put(_rows(merges, 4)),
        reads=put(_rows(reads, 4)),
        sums=put(items),
        splits=put(_rows(splits, 3)),
        slots=on_device(_slots(chunks[:, 1]) if far else n[:0], device),
        merge_levels=_spans(merges),
        read_levels=_spans(reads),
    )


def _slots(length: Tensor) -> Tensor:
    inside = torch.arange(PAIR_CHUNK)
    return (inside < length[:, None]).flatten().nonzero().flatten()


def _rows(tables: list[Tensor], columns: int) -> Tensor:
    return torch.cat([torch.zeros(0, columns, dtype=torch.int64), *tables])


def _spans(tables: list[Tensor]) -> tuple[tuple[int, int], ...]:
    spans, begin = [], 0
    for table in tables:
        spans.append((begin, begin + len(table)))
        begin += len(table)
    return tuple(spans)
