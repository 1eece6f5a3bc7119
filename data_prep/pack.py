"""Documents of any length to rows of equal length. Nothing but arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np


class PackedRow(NamedTuple):
    """tokens [T]; document_starts [n] int64 ascending, the first always 0.

    `continued`: position 0 goes on with the document of the row before, so that
    len(document_starts) - continued documents begin in this row.
    """

    tokens: np.ndarray
    document_starts: np.ndarray
    continued: bool


def pack(documents: Iterable[np.ndarray], row_tokens: int) -> Iterator[PackedRow]:
    """Lay the documents end to end and cut every `row_tokens`; no token is lost, added or moved.

    `documents`: 1-D arrays of one dtype, not empty, with their bos and eos. With documents of 5, 4
    and 2 tokens and row_tokens 4, each letter a document:

        row 0   A A A A   starts 0
        row 1   A B B B   starts 0 1   (continued)
        row 2   B C C     starts 0 1   (continued)

    Only the last row may be shorter than row_tokens; what becomes of it is the caller's choice.
    """
    parts: list[np.ndarray] = []
    starts: list[int] = []
    filled = 0
    continued = False
    for document in documents:
        taken = 0
        while taken < len(document):
            if taken == 0 or filled == 0:
                starts.append(filled)
                continued = continued or taken > 0
            part = document[taken : taken + row_tokens - filled]
            parts.append(part)
            taken += len(part)
            filled += len(part)
            if filled == row_tokens:
                yield PackedRow(np.concatenate(parts), np.array(starts, np.int64), continued)
                parts, starts, filled, continued = [], [], 0, False
    if filled:
        yield PackedRow(np.concatenate(parts), np.array(starts, np.int64), continued)
