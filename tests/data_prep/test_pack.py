from __future__ import annotations

import random

import numpy as np
import pytest

from data_prep.pack import pack


def test_the_drawn_example() -> None:
    documents = [np.full(5, 1), np.full(4, 2), np.full(2, 3)]
    rows = list(pack(documents, 4))
    assert [row.tokens.tolist() for row in rows] == [[1, 1, 1, 1], [1, 2, 2, 2], [2, 3, 3]]
    assert [row.document_starts.tolist() for row in rows] == [[0], [0, 1], [0, 1]]
    assert [row.continued for row in rows] == [False, True, True]


def test_a_document_that_ends_with_its_row_leaves_the_next_row_fresh() -> None:
    rows = list(pack([np.full(4, 1), np.full(8, 2), np.full(4, 3)], 4))
    assert [row.tokens[0] for row in rows] == [1, 2, 2, 3]
    assert [row.document_starts.tolist() for row in rows] == [[0]] * 4
    assert [row.continued for row in rows] == [False, False, True, False]


@pytest.mark.parametrize("row_tokens", [2, 3, 16, 1000])
def test_no_token_is_lost_and_every_start_is_marked(row_tokens: int) -> None:
    rng = random.Random(row_tokens)
    lengths = [rng.choice([1, 2, 3, row_tokens, rng.randrange(1, 60)]) for _ in range(200)]
    documents = [np.full(n, i, np.uint16) for i, n in enumerate(lengths)]
    rows = list(pack(documents, row_tokens))
    stream = np.concatenate(documents)
    assert np.array_equal(np.concatenate([row.tokens for row in rows]), stream)
    assert all(len(row.tokens) == row_tokens for row in rows[:-1])
    assert rows[-1].tokens.dtype == np.uint16
    begins = set(np.cumsum([0, *lengths[:-1]]).tolist())
    for n, row in enumerate(rows):
        first = n * row_tokens
        inside = {p - first for p in begins if first <= p < first + len(row.tokens)}
        assert row.document_starts.tolist() == sorted(inside | {0})
        assert row.continued == (0 not in inside)
    assert sum(len(row.document_starts) - row.continued for row in rows) == len(documents)


def test_nothing_in_nothing_out() -> None:
    assert list(pack([], 4)) == []
