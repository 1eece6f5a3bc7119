"""Selective copying: repeat, in order, the few tokens that matter among many that do not.

Two published tasks have this name; their numbers must never share a table.

Variant "s4" (the generator of the S4 repository, which the Mamba paper's experiment used). With
vocab_size A the ids are 0 blank, 1 .. A-2 data, A-1 marker. M data tokens, repetition allowed,
stand at sorted random places among the first P = T - M positions, the rest of them is 0; then come
M markers, and the m-th marker's own position has to predict the m-th data token. (S4 writes
P = L + M, so a row is L + 2M tokens; the Mamba paper has L = 4096, M = 16, A = 16.) With P = 9,
M = 3, A = 8:

    position   0   1   2   3   4   5   6   7   8   9  10  11
    tokens     0   4   0   0   6   0   0   4   0   7   7   7
    labels     .   .   .   .   .   .   .   .   .   4   6   4

Variant "adaptive-decay" (the public code of arXiv 2605.06946). Ids: 0 padding, never drawn, 1
separator, 2 blank, then (V-2) // 2 data ids, one unused, and the rest noise (V = 128: data 3 .. 65,
noise 67 .. 127). M DISTINCT data tokens at sorted random places, noise everywhere else in the first
T - M - 1 positions; a separator; M blanks. The separator and all blanks but the last predict the
data tokens in order. With T = 13, M = 3, V = 14, data 3 .. 8, noise 10 .. 13:

    position   0   1   2   3   4   5   6   7   8   9  10  11  12
    tokens    11   5  10  13   3  10   7  12  13   1   2   2   2
    labels     .   .   .   .   .   .   .   .   .   5   3   7   .

Every other label is -100. Chance for a token is 1 / (number of data ids).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np

from data_prep.mqar import MAX_VOCAB_SIZE, draw_distinct
from data_prep.shards import IGNORED_LABEL

CopyVariant = Literal["s4", "adaptive-decay"]
COPY_VARIANTS: tuple[CopyVariant, ...] = get_args(CopyVariant)
VOCAB_SIZE: dict[CopyVariant, int] = {"s4": 16, "adaptive-decay": 128}
"""Of the published experiments."""
SEPARATOR, BLANK, FIRST_DATA = 1, 2, 3  # adaptive-decay


@dataclass(frozen=True, kw_only=True)
class SelectiveCopyTask:
    """Settings of the task, checked when made; seq_len T and copied M as in the module's text."""

    seq_len: int
    copied: int = 16
    vocab_size: int = 16
    variant: CopyVariant = "s4"

    def __post_init__(self) -> None:
        if self.variant not in COPY_VARIANTS:
            raise ValueError(
                f"unknown variant of selective copying: got {self.variant}; expected one of "
                f"{', '.join(COPY_VARIANTS)}"
            )
        if self.copied < 1:
            raise ValueError(f"copied is too small: got {self.copied}; expected at least 1")
        shortest = 2 * self.copied + (self.variant == "adaptive-decay")
        if self.seq_len < shortest:
            raise ValueError(
                f"seq-len does not fit {self.copied} copied tokens: got {self.seq_len}; expected "
                f"at least {shortest}; raise it or lower copied"
            )
        smallest = 3 if self.variant == "s4" else max(7, 2 * self.copied + 3)
        if not smallest <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"vocab-size does not fit: got {self.vocab_size}; expected {smallest} to "
                f"{MAX_VOCAB_SIZE}; change it"
            )

    @property
    def data_ids(self) -> range:
        """The ids that are copied."""
        if self.variant == "s4":
            return range(1, self.vocab_size - 1)
        return range(FIRST_DATA, FIRST_DATA + (self.vocab_size - 2) // 2)

    @property
    def noise_ids(self) -> range:
        """The ids that stand between them."""
        if self.variant == "s4":
            return range(1)
        return range(self.data_ids.stop + 1, self.vocab_size)

    def settings(self) -> dict[str, int | float | bool | str]:
        """Plain values for a manifest."""
        return asdict(self)


def draw_block(
    task: SelectiveCopyTask, rows: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """tokens and labels, both int64 [rows, T]."""
    T, M = task.seq_len, task.copied
    s4 = task.variant == "s4"
    places = T - M if s4 else T - M - 1  # where data can stand
    where = np.sort(draw_distinct(rng, np.ones(places, np.float32), rows, M), axis=1)
    ids = np.array(task.data_ids)
    if s4:
        data = rng.choice(ids, (rows, M))
    else:
        data = ids[draw_distinct(rng, np.ones(len(ids), np.float32), rows, M)]

    noise = task.noise_ids
    tokens = rng.integers(noise.start, noise.stop, (rows, T))
    labels = np.full((rows, T), IGNORED_LABEL, np.int64)
    np.put_along_axis(tokens, where, data, axis=1)
    if s4:
        tokens[:, places:] = task.vocab_size - 1
    else:
        tokens[:, places] = SEPARATOR
        tokens[:, places + 1 :] = BLANK
    labels[:, places : places + M] = data
    return tokens, labels
