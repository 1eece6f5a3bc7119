"""Finished data sets as training reads them: cut to a sequence length, mixed, in a shuffled order.

    TrainingRows   one split, every packed row cut into rows of seq_len tokens
    MixedRows      several of them by weight

Both give len(), [i] -> Row, and `epoch_order(seed, epoch)`: the numbers of the rows of an epoch in
the order they are read, a function of nothing else. Ranks, workers and interruptions do not enter,
so any of them may change in the middle of an epoch. A row's number is its identity for as long as
the data set and seq_len stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from data_prep.shards import IGNORED_LABEL, Row, Rows

Damaged = Literal["stop", "skip"]


def warn(message: str) -> None:
    """A line on stderr."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class TrainingRows:
    """The rows of a split, cut into rows of seq_len tokens.

    A document that is cut goes on at the start of the next row as a document of its own.

    Args:
        dataset: folder written by data_prep, or a cache of one.
        split: "train" or "validation".
        seq_len: tokens of a row; divides the data set's row_tokens.
        shuffle_shards: None shuffles all rows at once; N mixes the rows of N shards at a time, so
            that reading touches few shards at once.
        damaged: what a row of a missing or damaged shard does: "stop" raises ValueError or
            FileNotFoundError, "skip" gives a row without a label that counts and tells `report`
            once a shard. Skipping leaves every other row where it is in the order.
        report: takes one line.
    """

    def __init__(
        self,
        dataset: Path,
        split: str,
        seq_len: int,
        *,
        shuffle_shards: int | None = None,
        damaged: Damaged = "stop",
        report: Callable[[str], None] = warn,
    ) -> None:
        self.rows = Rows(dataset, split)
        self.seq_len = seq_len
        self.pieces = self.rows.manifest.row_tokens // seq_len
        self._shuffle_shards = shuffle_shards
        self._damaged = damaged
        self._report = report
        self._told: set[str] = set()
        _check_shuffle(self.rows, shuffle_shards)

    def __len__(self) -> int:
        return len(self.rows) * self.pieces

    def __getitem__(self, index: int) -> Row:
        begin = index % self.pieces * self.seq_len
        try:
            return self.rows.cut(index // self.pieces, begin, begin + self.seq_len)
        except (ValueError, OSError) as error:
            if self._damaged == "stop":
                raise
            if str(error) not in self._told:
                self._told.add(str(error))
                self._report(f"rows are skipped: {error}")
            return Row(
                np.zeros(self.seq_len, np.int64),
                np.full(self.seq_len, IGNORED_LABEL, np.int64),
                np.zeros(1, np.int64),
            )

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """[len] int64: a permutation of all rows."""
        if self._shuffle_shards is None:
            return _permutation(len(self), seed, epoch)
        ends = tuple((self.rows.shard_ends * self.pieces).tolist())
        return _window_permutation(ends, self._shuffle_shards, seed, epoch)


class MixedRows:
    """Rows of several data sets of one seq_len, in the proportion of their weights.

    An epoch has as many rows as all of them together. Of part i it takes the share
    w_i / sum(w), rounded to whole rows, from the part's own endless sequence of shuffled epochs:
    so every row of a part is used equally often over time, whatever the weights. Where the parts'
    rows stand among each other is shuffled too.
    """

    def __init__(self, parts: Sequence[tuple[TrainingRows, float]]) -> None:
        lengths = {part.seq_len for part, _ in parts}
        if len(lengths) != 1:
            raise ValueError(f"mixed rows differ in length: got seq_len {sorted(lengths)}")
        self.parts = [part for part, _ in parts]
        self.seq_len = self.parts[0].seq_len
        self._starts = np.cumsum([0, *(len(part) for part in self.parts)])
        weights = np.array([weight for _, weight in parts], float)
        exact = len(self) * weights / weights.sum()
        self.counts = np.floor(exact).astype(np.int64)
        missing = len(self) - int(self.counts.sum())
        self.counts[np.argsort(self.counts - exact, kind="stable")[:missing]] += 1

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.parts[part][index - int(self._starts[part])]

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """[len] int64 row numbers; a row may come several times, or not at all in an epoch."""
        rng = np.random.default_rng([seed, epoch, len(self.parts)])
        labels = rng.permutation(np.repeat(np.arange(len(self.parts)), self.counts))
        order = np.empty(len(self), np.int64)
        for number, part in enumerate(self.parts):
            count = int(self.counts[number])
            rows = _stretch(part, seed + number, epoch * count, count)
            order[labels == number] = rows + self._starts[number]
        return order


def _stretch(part: TrainingRows, seed: int, first: int, count: int) -> np.ndarray:
    """`count` rows of a part's endless sequence of epochs, from position `first` on."""
    taken = []
    while count > 0:
        epoch, at = divmod(first, len(part))
        rows = part.epoch_order(seed, epoch)[at : at + count]
        taken.append(rows)
        first += len(rows)
        count -= len(rows)
    return np.concatenate(taken) if taken else np.empty(0, np.int64)


@lru_cache(maxsize=4)  # an update touches two epochs at most unless the data set is tiny
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


@lru_cache(maxsize=4)
def _window_permutation(ends: tuple[int, ...], window: int, seed: int, epoch: int) -> np.ndarray:
    rng = np.random.default_rng([seed, epoch, window])
    starts = (0, *ends[:-1])
    shards = rng.permutation(len(ends))
    order = []
    for begin in range(0, len(shards), window):
        together = [np.arange(starts[s], ends[s]) for s in shards[begin : begin + window]]
        order.append(rng.permutation(np.concatenate(together)))
    return np.concatenate(order)


def _check_shuffle(rows: Rows, shuffle_shards: int | None) -> None:
    """A cache that cannot hold what is shuffled together would fetch a shard for every row."""
    if rows.cache_limit_bytes is None:
        return
    largest = max(rows.shard_bytes)
    room = rows.cache_limit_bytes // largest - 1  # one for the change from window to window
    needed = len(rows.shard_bytes) if shuffle_shards is None else shuffle_shards
    if sum(rows.shard_bytes) > rows.cache_limit_bytes and needed > room:
        raise ValueError(
            f"the cache is smaller than what is shuffled together: got {rows.cache_limit_bytes} "
            f"bytes for {needed} shards of up to {largest}; expected room for one more than that; "
            f"set data.shuffle_shards to at most {room}, or raise data.cache_bytes"
        )
