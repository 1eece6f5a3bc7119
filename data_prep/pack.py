"""Documents end to end, cut every `row_tokens`: which documents, and which tokens of them, a shard
holds.

The documents of a split, in their order, are one stream of tokens, of which row r is
[r * row_tokens, (r + 1) * row_tokens). With documents A, B and C of 5, 4 and 2 tokens and
row_tokens 4:

    row 0   A A A A   document starts 0
    row 1   A B B B   document starts 0 1
    row 2   B C C     document starts 0 1   (the incomplete last row is dropped)

No token is lost, added or moved: a long document stays whole across consecutive rows. A shard is a
run of rows, so each can be made by itself, in any order, on any machine.

The order is that of the corpus, document copies beyond the first after all first ones; or the
longest first, in buckets of powers of two tokens, each in corpus order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.unit_files import UnitTable


@dataclass(frozen=True)
class Run:
    """Documents of one unit that follow each other in the stream.

    They are those of split `split` with copies > `copy` and, if `bucket` is not None, a length in
    [2^bucket, 2^(bucket + 1)); the first begins at stream position `start`.
    """

    table: Path
    copies: np.ndarray  # of all the unit's documents
    split: int
    copy: int
    bucket: int | None
    start: int
    tokens: int

    def documents(self) -> np.ndarray:
        """Their numbers in the unit, ascending."""
        return _members(UnitTable(self.table), self.copies, self.split, self.copy, self.bucket)


class Rows(NamedTuple):
    """The rows of a shard.

    tokens: [rows, row_tokens].
    begins: positions in the flattened tokens where a document begins, ascending.
    firsts: how many of these are a document's first copy.
    text_bytes: UTF-8 bytes are counted by the caller, from the tokens.
    longest: [rows] int64, tokens of the longest document with a token in the row.
    """

    tokens: np.ndarray
    begins: np.ndarray
    firsts: int
    longest: np.ndarray


def lay_out(
    tables: Sequence[UnitTable], copies: Sequence[np.ndarray], split: int, by_length: bool
) -> list[Run]:
    """The stream of a split."""
    # [(bucket, copy)] -> per unit its tokens there
    found: dict[tuple[int | None, int], list[tuple[int, int]]] = {}
    for unit, (table, used) in enumerate(zip(tables, copies, strict=True)):
        mine = np.flatnonzero((table.column("splits") == split) & (used > 0))
        lengths = table.column("lengths")[mine]
        buckets = bucket_of(lengths) if by_length else np.zeros(len(mine), np.int64)
        for bucket in np.unique(buckets):
            inside = buckets == bucket
            for copy in range(int(used[mine[inside]].max())):
                tokens = int(lengths[inside & (used[mine] > copy)].sum())
                key = (int(bucket) if by_length else None, copy)
                found.setdefault(key, []).append((unit, tokens))
    runs: list[Run] = []
    start = 0
    for bucket, copy in sorted(found, key=lambda key: (-(key[0] or 0), key[1])):
        for unit, tokens in found[bucket, copy]:
            run = Run(tables[unit].path, copies[unit], split, copy, bucket, start, tokens)
            runs.append(run)
            start += tokens
    return runs


def read_rows(runs: Sequence[Run], first_row: int, rows: int, row_tokens: int, dtype: str) -> Rows:
    """Rows [first_row, first_row + rows) of the stream, of which `runs` holds the part needed."""
    begin, end = first_row * row_tokens, (first_row + rows) * row_tokens
    tokens = np.empty(end - begin, dtype)
    longest = np.zeros(rows, np.int64)
    begins: list[int] = []
    firsts = 0
    for run in runs:
        table = UnitTable(run.table)
        lengths = table.column("lengths")
        offsets = np.cumsum(lengths) - lengths
        stored = table.tokens(np.dtype(dtype))
        documents = run.documents()
        ends = run.start + np.cumsum(lengths[documents])
        inside = (ends > begin) & (ends - lengths[documents] < end)
        for document, stop in zip(documents[inside].tolist(), ends[inside].tolist(), strict=True):
            length, offset = int(lengths[document]), int(offsets[document])
            start = stop - length
            low, high = max(start, begin), min(stop, end)
            tokens[low - begin : high - begin] = stored[
                offset + low - start : offset + high - start
            ]
            touched = slice((low - begin) // row_tokens, (high - begin - 1) // row_tokens + 1)
            np.maximum(longest[touched], length, out=longest[touched])
            if start >= begin:
                begins.append(start - begin)
                firsts += run.copy == 0
    return Rows(tokens.reshape(rows, row_tokens), np.array(begins, np.int64), firsts, longest)


def names_from(runs: Sequence[Run], position: int) -> Iterator[str]:
    """Names of the documents whose first copy begins at `position` or behind it."""
    for run in runs:
        if run.copy > 0 or run.start + run.tokens <= position:
            continue
        table = UnitTable(run.table)
        documents = run.documents()
        lengths = table.column("lengths")[documents]
        starts = run.start + np.cumsum(lengths) - lengths
        names = table.record()["names"]
        for document in documents[starts >= position]:
            yield names[document]


def bucket_of(lengths: np.ndarray) -> np.ndarray:
    """floor(log2(length)), exactly."""
    return np.frexp(lengths.astype(np.float64))[1].astype(np.int64) - 1


def _members(
    table: UnitTable, copies: np.ndarray, split: int, copy: int, bucket: int | None
) -> np.ndarray:
    chosen = (table.column("splits") == split) & (copies > copy)
    if bucket is not None:
        chosen &= bucket_of(table.column("lengths")) == bucket
    return np.flatnonzero(chosen)
