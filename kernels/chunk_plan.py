"""Where tokens lie in chunks and which tree node is read by which chunk: integers only.

A chunk is C = 2**m consecutive positions of one document, aligned to that document's position 0.
Levels 0..m lie inside a chunk; level m+1+j is a block of 2**j whole chunks, node (j, b), which
covers chunks [b << j, (b+1) << j) of its document. Chunk c reads node (j, (c >> j) - 1) for every
set bit j of c, and a node is its left half carried over its right half, plus the right half. So
all work is batched over chunks and nodes, and only the log2(T / C) tree levels are sequential. A
plan depends on lengths and positions alone and is shared by all layers of a model.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.host_tables import on_device, to_last
from kernels.levels import bit_length, level


@dataclass(frozen=True)
class TreeLevel:
    """One chunk level j: its nodes are the composed ones, then those taken from the past.

    readers [R] chunks that read a node of this level, read_node [R] which one;
    last_readers [E] positions in `readers` that are last chunks of their document,
    last_documents [E] those documents;
    past_documents [P] documents whose initial state has a block on this level;
    left, right [Q] nodes of this level that make up the composed nodes of the next.
    """

    readers: Tensor
    read_node: Tensor
    last_readers: Tensor
    last_documents: Tensor
    past_documents: Tensor
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class PartialChunk:
    """Initial blocks of one level, at most m, that end inside their document's first chunk.

    level: theirs after the carry; documents [P];
    levels [P, C]: at which level each slot of that chunk sees the block;
    last_levels [P]: the level after the document's last token where that still lies in the first
    chunk, else -1 (the block has then become part of a node).
    """

    level: int
    documents: Tensor
    levels: Tensor
    last_levels: Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Layout of N documents in `num_chunks` chunks of C = 2**m slots.

    slot_of_token [tokens]; token_of_slot [num_chunks * C], `tokens` where a slot is empty;
    both None where tokens already lie chunk by chunk. first_chunk, last_chunk [N];
    last_slot_levels [N, C]: level at which the last token sees each slot of its chunk, -1 if not;
    leaves [nodes of level 0]: the chunk that each composed node of chunk level 0 is.
    """

    C: int
    m: int
    num_chunks: int
    tokens: int
    slot_of_token: Tensor | None
    token_of_slot: Tensor | None
    first_chunk: Tensor
    last_chunk: Tensor
    last_slot_levels: Tensor
    leaves: Tensor
    partial: tuple[PartialChunk, ...]
    tree: tuple[TreeLevel, ...]

    def to_chunks(self, x: Tensor) -> Tensor:
        """[B, T, ...] (B * T = tokens) -> [num_chunks, C, ...], zero in empty slots."""
        flat = x.reshape(self.tokens, *x.shape[2:])
        if self.token_of_slot is not None:
            nothing = flat.new_zeros(1, *flat.shape[1:])
            flat = torch.cat([flat, nothing]).index_select(0, self.token_of_slot)
        return flat.reshape(self.num_chunks, self.C, *x.shape[2:])

    def from_chunks(self, x: Tensor, B: int) -> Tensor:
        """[num_chunks, C, ...] -> [B, T, ...]: the inverse of `to_chunks`."""
        flat = x.reshape(self.num_chunks * self.C, *x.shape[2:])
        if self.slot_of_token is not None:
            flat = flat.index_select(0, self.slot_of_token)
        return flat.reshape(B, self.tokens // B, *x.shape[2:])


@lru_cache(maxsize=64)
def chunk_plan(
    lengths: tuple[int, ...], positions: tuple[int, ...], max_C: int, device: torch.device
) -> ChunkPlan:
    """The plan for documents of these lengths (>= 1) that start at these positions (>= 0).

    max_C is a power of two; chunks are shorter where every document is. Made on the host, its
    tensors are then put on `device`.
    """
    return to_last(lambda: _chunk_plan(lengths, positions, max_C, device))


def _chunk_plan(
    lengths: tuple[int, ...], positions: tuple[int, ...], max_C: int, device: torch.device
) -> ChunkPlan:
    longest = max(p + n for p, n in zip(positions, lengths, strict=True))
    m = min((longest - 1).bit_length(), max_C.bit_length() - 1)
    C = 1 << m
    documents = list(zip(positions, lengths, strict=True))
    begin = [p >> m for p, _ in documents]  # first and last chunk, counted inside the document
    end = [(p + n - 1) >> m for p, n in documents]
    base = [0]  # the document's first chunk, counted over all documents
    for b, e in zip(begin, end, strict=True):
        base.append(base[-1] + e - b + 1)
    num_chunks, tokens = base[-1], sum(lengths)
    aligned = all(p % C == 0 and n % C == 0 for p, n in documents)
    slots = _slot_of_token(documents, base, C)
    token_of_slot = torch.full((num_chunks * C,), tokens)
    token_of_slot[slots] = torch.arange(tokens)
    plan = ChunkPlan(
        C=C,
        m=m,
        num_chunks=num_chunks,
        tokens=tokens,
        slot_of_token=None if aligned else slots,
        token_of_slot=None if aligned else token_of_slot,
        first_chunk=torch.tensor(base[:-1]),
        last_chunk=torch.tensor(base[1:]) - 1,
        last_slot_levels=_last_slot_levels(documents, C),
        leaves=_concatenate([torch.arange(base[n], base[n + 1] - 1) for n in range(len(lengths))]),
        partial=_partial_chunks(documents, m),
        tree=_tree(begin, end, base),
    )
    return _on_device(plan, device)


def _slot_of_token(documents: list[tuple[int, int]], base: list[int], C: int) -> Tensor:
    first = [base[n] * C + p % C for n, (p, _) in enumerate(documents)]
    return _concatenate(
        [torch.arange(s, s + length) for s, (_, length) in zip(first, documents, strict=True)]
    )


def _last_slot_levels(documents: list[tuple[int, int]], C: int) -> Tensor:
    position = torch.tensor([p for p, _ in documents])[:, None]
    t = position + torch.tensor([length for _, length in documents])[:, None] - 1
    s = t // C * C + torch.arange(C)
    return torch.where((position <= s) & (s <= t), bit_length(t ^ s), -1)


def _partial_chunks(documents: list[tuple[int, int]], m: int) -> tuple[PartialChunk, ...]:
    C, partial = 1 << m, []
    for i in range(m):
        inside, levels, last_levels = [], [], []
        for n, (p, length) in enumerate(documents):
            if not p >> i & 1:
                continue
            block = (p >> (i + 1)) << (i + 1)  # first token of the block of 2**i tokens
            start, t_last = p // C * C, p + length - 1
            inside.append(n)
            levels.append([level(t, block) if t >= p else 0 for t in range(start, start + C)])
            last_levels.append(level(t_last, block) if t_last < start + C else -1)
        if inside:
            columns = (torch.tensor(column) for column in (inside, levels, last_levels))
            partial.append(PartialChunk(i + 1, *columns))
    return tuple(partial)


def _tree(begin: list[int], end: list[int], base: list[int]) -> tuple[TreeLevel, ...]:
    """Composed nodes of level j in one document: b from begin >> j to (end >> j) - 1, those that
    end at or before the last chunk; one that begins before `begin` has the past inside it."""
    tree = []
    for j in range(max(end).bit_length()):
        first = [b >> j for b in begin]
        count = [(e >> j) - f for e, f in zip(end, first, strict=True)]
        offset = [0]
        for nodes in count:
            offset.append(offset[-1] + nodes)
        past = [n for n, b in enumerate(begin) if b >> j & 1]
        node_of_past = {n: offset[-1] + i for i, n in enumerate(past)}
        readers, read_node, lefts, rights = [], [], [], []
        for n in range(len(begin)):
            c = torch.arange(begin[n], end[n] + 1)
            c = c[(c >> j) & 1 == 1]
            node = (c >> j) - 1
            readers.append(c - begin[n] + base[n])
            read_node.append(_node_index(node, n, first, offset, node_of_past))
            parent = torch.arange(begin[n] >> (j + 1), end[n] >> (j + 1))
            lefts.append(_node_index(2 * parent, n, first, offset, node_of_past))
            rights.append(_node_index(2 * parent + 1, n, first, offset, node_of_past))
        reader = _concatenate(readers)
        document_of_last = {base[n + 1] - 1: n for n in range(len(begin))}
        pairs = [
            (i, document_of_last[chunk])
            for i, chunk in enumerate(reader.tolist())
            if chunk in document_of_last
        ]
        tree.append(
            TreeLevel(
                readers=reader,
                read_node=_concatenate(read_node),
                last_readers=torch.tensor([i for i, _ in pairs], dtype=torch.int64),
                last_documents=torch.tensor([n for _, n in pairs], dtype=torch.int64),
                past_documents=torch.tensor(past, dtype=torch.int64),
                left=_concatenate(lefts),
                right=_concatenate(rights),
            )
        )
    return tuple(tree)


def _node_index(
    node: Tensor, n: int, first: list[int], offset: list[int], node_of_past: dict[int, int]
) -> Tensor:
    past = node < first[n]  # at most one node of a level: the block just before the first chunk
    return torch.where(past, node_of_past.get(n, 0), node - first[n] + offset[n])


def _concatenate(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).to(torch.int64)


_Part = TypeVar("_Part", ChunkPlan, TreeLevel, PartialChunk)


def _on_device(part: _Part, device: torch.device) -> _Part:
    moved: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = on_device(value, device)
        elif isinstance(value, tuple):
            moved[field.name] = tuple(_on_device(inner, device) for inner in value)
    return replace(part, **moved)
