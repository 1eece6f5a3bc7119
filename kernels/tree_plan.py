"""The work list of the Triton kernels: chunks, groups of chunks and tree nodes, integers only.

A chunk is CHUNK consecutive positions of one document, aligned to that document's position 0; a
group is GROUP consecutive chunks, aligned the same way. Nodes lie in a Fenwick array: the node
that ends where chunk e of a document begins covers the lowbit(e) chunks before it, and chunk c
reads the nodes e = c, c & (c-1), ... So one slot for each chunk holds the whole tree. A document
that begins in a later chunk than 0 (its past is a state) has no nodes that end at or before that
chunk, and its first nodes cover only what is there.

Rows of every table are what one program of a kernel needs to know, so packed documents, partial
chunks and plain rows run the same code. A plan depends on the documents alone and is shared by
all layers and operators.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.host_tables import on_device, to_last

CHUNK = 128
GROUP = 8
READERS_PER_ITEM = 32
"""Chunks that one program of the node gradient reads at most: bounds the longest program."""


@dataclass(frozen=True)
class TreePlan:
    """Tables on the device, int32, for documents laid end to end.

    chunks [num_chunks, 6]: first token, tokens in it, its index c in the document, nodes it reads,
        first and last chunk of its document (as indices in the document, like c).
    groups [num_groups, 6]: number that a chunk 0 of the group has or would have, its first and
        last + 1 chunk that exist, index of the group in its document, first and last group of
        that document (all three as indices in the document).
    node_items [items, 5]: a node's gradient, at most READERS_PER_ITEM of its reader chunks: number
        of the chunk that the node ends at, first reader, readers, 1 + chunk level of the node, and
        where the sum goes: -1 for the node's own slot, else a slot of the group gradients.
    split_nodes [nodes, 3]: nodes with several items: group slot, first partial slot, partials.
    group_slots: group gradients' slots: one for each group, then the partial sums.
    num_levels: 1 + the highest chunk level that any chunk reads.
    """

    num_chunks: int
    num_groups: int
    group_slots: int
    num_levels: int
    chunks: Tensor
    groups: Tensor
    node_items: Tensor
    split_nodes: Tensor


@lru_cache(maxsize=64)
def tree_plan(
    lengths: tuple[int, ...], first_chunks: tuple[int, ...], device: torch.device
) -> TreePlan:
    """The plan for documents of these lengths that begin at chunk `first_chunks` of their own."""
    return to_last(lambda: _tree_plan(lengths, first_chunks, device))


def _tree_plan(
    lengths: tuple[int, ...], first_chunks: tuple[int, ...], device: torch.device
) -> TreePlan:
    chunks: list[Tensor] = []
    groups: list[list[int]] = []
    num_chunks, token, highest = 0, 0, 0
    documents = []
    for length, first in zip(lengths, first_chunks, strict=True):
        last = first + (length - 1) // CHUNK
        chunks.append(_chunk_rows(token, length, first, last))
        first_group = len(groups)
        for g in range(first // GROUP, last // GROUP + 1):
            begin, end = max(first, g * GROUP), min(last + 1, (g + 1) * GROUP)
            base = num_chunks + g * GROUP - first
            inside = [begin - g * GROUP, end - g * GROUP]
            groups.append([base, *inside, g, first // GROUP, last // GROUP])
        documents.append((first, last, num_chunks, first_group))
        num_chunks += last - first + 1
        token += length
        highest = max(highest, last.bit_length() if last > first else 0)
    items, splits, group_slots = _node_rows(documents, len(groups))
    return TreePlan(
        num_chunks=num_chunks,
        num_groups=len(groups),
        group_slots=group_slots,
        num_levels=1 + highest,
        chunks=on_device(torch.cat(chunks), device),
        groups=on_device(_table(groups, 6), device),
        node_items=on_device(items, device),
        split_nodes=on_device(splits, device),
    )


class Room(NamedTuple):
    """How many chunks and groups to allocate: known from shapes alone, at least the plan's."""

    chunks: int
    groups: int

    @staticmethod
    def for_rows(B: int, T: int, cu_seqlens: Tensor | None) -> "Room":
        """Room for B rows of T tokens, or for what cu_seqlens [N+1] cuts one row into."""
        documents = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        chunks = B * (-(-T // CHUNK)) if cu_seqlens is None else T // CHUNK + documents
        return Room(chunks, chunks // GROUP + 2 * documents)


def _chunk_rows(token: int, length: int, first: int, last: int) -> Tensor:
    c = torch.arange(first, last + 1, dtype=torch.int64)
    start = (c - first) * CHUNK
    read, ends = torch.zeros_like(c), c.clone()
    while bool((ends > first).any()):
        read += (ends > first).to(read.dtype)
        ends &= ends - 1
    columns = [token + start, (length - start).clamp(max=CHUNK), c, read]
    columns += [torch.full_like(c, first), torch.full_like(c, last)]
    return torch.stack(columns, dim=1).to(torch.int32)


def _node_rows(
    documents: list[tuple[int, int, int, int]], num_groups: int
) -> tuple[Tensor, Tensor, int]:
    items: list[list[int]] = []
    splits: list[list[int]] = []
    partial = num_groups
    for first, last, base, first_group in documents:
        for e in range(first + 1, last + 1):
            size = e & -e
            readers = min(size, last + 1 - e)
            parts = -(-readers // READERS_PER_ITEM)
            target, step = -1, 0
            if e % GROUP == 0:
                target = own = first_group + e // GROUP - first // GROUP
                if parts > 1:
                    splits.append([own, partial, parts])
                    target, step = partial, 1
                    partial += parts
            for part in range(parts):
                begin = part * READERS_PER_ITEM
                count = min(READERS_PER_ITEM, readers - begin)
                slot = target + part * step
                items.append([base + e - first, base + e - first + begin, count])
                items[-1] += [size.bit_length(), slot]
    items.sort(key=lambda item: -item[2])  # the longest first, so that none runs alone at the end
    return _table(items, 5), _table(splits, 3), partial


def _table(rows: list[list[int]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, columns)
