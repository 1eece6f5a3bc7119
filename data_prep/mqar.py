"""Multi-query associative recall: the synthetic task on which recall of a fixed state breaks first.

A row of T tokens binds N keys to N values, then asks for each key once. Two published tasks have
this name; their numbers must never share a table.

Variant "zoology" (Arora et al., arXiv 2312.04927). With T = 16, N = 2, keys 3 and 5, values 11 and
14, vocab_size 18, filler and ignored labels shown as `.`:

    position   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
    tokens     3  11   5  14   5   .   .   .   3   .   .   .   .   .   .   .
    labels     .   .   .   .  14   .   .   .  11   .   .   .   .   .   .   .
               `--context--'   `- key 5 asked       `- key 3 asked: logits here must say 11

  * Keys are N distinct ids of 1 .. V/2-1, values N distinct ids of V/2 .. V-1, V = vocab_size.
    Id 0 is the blank. The context k1 v1 k2 v2 ... fills the first 2N tokens.
  * The rest is S = (T - 2N) / 2 slots of two tokens, j = 1 .. S. N distinct slots are drawn one
    after the other with probability proportional to j^(power - 1); key i is asked in the i-th
    drawn: most queries come soon after the context, some very late (power = 0.01).
  * The label stands at the query's own position; the value is never written after the query.
    Every other label is -100.
  * `random_non_queries`: every blank becomes a uniform draw from 0 .. V-1, which may repeat keys
    and values; without it blanks stay 0 (the setting of the ICLR 2024 figures).

Variant "adaptive-decay" (the public code of arXiv 2605.06946; V = 128 there). The same context, but
the N queries, keys in random order, stand at fixed places at the end, T-2N, T-2N+2, ..., and every
other position after the context is a uniform draw from 1 .. V-1, so that fillers repeat keys of the
context: at V = 128, N = 32 a quarter of them do. With T = 16, N = 2, V = 18:

    position   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
    tokens     3  11   5  14   9   2  17   5   1   8  12   6   5   4   3  10
    labels     .   .   .   .   .   .   .   .   .   .   .   .  14   .  11   .
               `--context--'   `----------fillers---------'  `5 asked `3 asked
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np

from data_prep.shards import IGNORED_LABEL

MqarVariant = Literal["zoology", "adaptive-decay"]
MQAR_VARIANTS: tuple[MqarVariant, ...] = get_args(MqarVariant)
VOCAB_SIZE: dict[MqarVariant, int] = {"zoology": 8192, "adaptive-decay": 128}
"""Of the published experiments."""
MAX_VOCAB_SIZE = 1 << 20  # drawing a block takes four bytes a row and id


@dataclass(frozen=True, kw_only=True)
class MqarTask:
    """Settings of the task; checked when made. seq_len T and pairs N as in the module docstring."""

    seq_len: int
    pairs: int
    vocab_size: int = 8192
    power: float = 0.01
    """zoology only."""
    random_non_queries: bool = True
    """zoology only."""
    variant: MqarVariant = "zoology"

    def __post_init__(self) -> None:
        if self.variant not in MQAR_VARIANTS:
            raise ValueError(
                f"unknown variant of MQAR: got {self.variant}; expected one of "
                f"{', '.join(MQAR_VARIANTS)}"
            )
        zoology = self.variant == "zoology"
        if self.pairs < 1:
            raise ValueError(f"pairs is too small: got {self.pairs}; expected at least 1")
        if self.seq_len % 2 or self.seq_len < 4 * self.pairs:
            raise ValueError(
                f"seq-len does not fit {self.pairs} pairs: got {self.seq_len}; expected an even "
                f"number of at least {4 * self.pairs} (4 * pairs); raise it or lower pairs"
            )
        smallest = max(self.seq_len + 1 if zoology else 0, 2 * self.pairs + 2)
        if self.vocab_size % 2 or not smallest <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"vocab-size does not fit: got {self.vocab_size}; expected an even number of at "
                f"least {smallest + smallest % 2} ({'more than seq-len, with ' if zoology else ''}"
                f"room for {self.pairs} keys in the lower half) and at most {MAX_VOCAB_SIZE}; "
                "change it"
            )
        if not 0 < self.power <= 1:
            raise ValueError(f"power is out of range: got {self.power}; expected 0 < power <= 1")
        if not zoology and (self.power, self.random_non_queries) != (0.01, True):
            raise ValueError(
                "power and random-non-queries act on variant zoology only: got variant "
                f"{self.variant}; leave them out"
            )

    def settings(self) -> dict[str, int | float | bool | str]:
        """Plain values for a manifest."""
        return asdict(self)


def draw_block(
    task: MqarTask, rows: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """tokens and labels, both int64 [rows, T]."""
    half, pairs = task.vocab_size // 2, task.pairs
    keys = 1 + draw_distinct(rng, np.ones(half - 1, np.float32), rows, pairs)
    values = half + draw_distinct(rng, np.ones(half, np.float32), rows, pairs)
    if task.variant == "zoology":
        slots = 1 + np.arange((task.seq_len - 2 * pairs) // 2, dtype=np.float32)
        queries = 2 * pairs + 2 * draw_distinct(rng, slots ** (task.power - 1), rows, pairs)
    else:
        order = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)
        queries = task.seq_len - 2 * pairs + 2 * order

    tokens = np.zeros((rows, task.seq_len), np.int64)
    labels = np.full((rows, task.seq_len), IGNORED_LABEL, np.int64)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(tokens, queries, keys, axis=1)
    np.put_along_axis(labels, queries, values, axis=1)
    if task.variant == "adaptive-decay":
        tokens = np.where(tokens == 0, rng.integers(1, task.vocab_size, tokens.shape), tokens)
    elif task.random_non_queries:
        filler = rng.integers(0, task.vocab_size, tokens.shape)
        tokens = np.where(tokens == 0, filler, tokens)
    return tokens, labels


def draw_distinct(
    rng: np.random.Generator, weights: np.ndarray, rows: int, count: int
) -> np.ndarray:
    """[rows, count]: per row `count` different indices into `weights`, in the order drawn.

    An exponential race: index j arrives after a time Exp(1) / weights[j], and the first `count`
    arrivals are distributed as successive weighted draws without replacement.
    """
    arrival = rng.standard_exponential((rows, len(weights)), dtype=np.float32) / weights
    first = np.argpartition(arrival, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(arrival, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1)
