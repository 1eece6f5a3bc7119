from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.pack import bucket_of, lay_out, names_from, read_rows
from data_prep.unit_files import UnitTable

Documents = list[np.ndarray]


def write_unit(folder: Path, number: int, documents: Documents, splits: list[int]) -> UnitTable:
    path = folder / f"{number:06d}-0.npz"
    record = {"names": [f"{number}/{n}" for n in range(len(documents))]}
    np.savez(
        path,
        record=np.frombuffer(json.dumps(record).encode(), np.uint8),
        lengths=np.array([len(d) for d in documents], np.int64),
        splits=np.array(splits, np.uint8),
    )
    joined = np.concatenate([np.empty(0, "uint16"), *documents])
    path.with_suffix(".tokens").write_bytes(joined.astype("uint16").tobytes())
    return UnitTable(path)


def ones(tables: list[UnitTable]) -> list[np.ndarray]:
    return [np.ones(len(table.column("splits")), np.uint16) for table in tables]


def test_the_drawn_example(tmp_path: Path) -> None:
    documents = [np.full(5, 1), np.full(4, 2), np.full(2, 3)]
    tables = [write_unit(tmp_path, 0, documents, [0, 0, 0])]
    runs = lay_out(tables, ones(tables), 0, by_length=False)
    assert runs[-1].start + runs[-1].tokens == 11
    rows = read_rows(runs, 0, 2, 4, "uint16")
    assert rows.tokens.tolist() == [[1, 1, 1, 1], [1, 2, 2, 2]]
    assert rows.begins.tolist() == [0, 5]
    assert rows.firsts == 2
    assert rows.longest.tolist() == [5, 5]
    assert list(names_from(runs, 8)) == ["0/2"]


def test_a_document_that_ends_with_its_row_leaves_the_next_row_fresh(tmp_path: Path) -> None:
    documents = [np.full(4, 1), np.full(8, 2), np.full(4, 3)]
    tables = [write_unit(tmp_path, 0, documents, [0, 0, 0])]
    rows = read_rows(lay_out(tables, ones(tables), 0, by_length=False), 0, 4, 4, "uint16")
    assert rows.tokens[:, 0].tolist() == [1, 2, 2, 3]
    assert rows.begins.tolist() == [0, 4, 12]
    assert rows.longest.tolist() == [4, 8, 8, 4]


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("row_tokens", [2, 3, 16, 1000])
def test_no_token_is_lost_or_moved_and_every_start_is_marked(
    tmp_path: Path, row_tokens: int, by_length: bool
) -> None:
    rng = random.Random(row_tokens)
    tables, copies, documents, chosen = [], [], [], []
    for unit in range(6):
        lengths = [rng.choice([1, 2, 3, row_tokens, rng.randrange(1, 60)]) for _ in range(40)]
        texts = [np.full(n, 100 * unit + i) for i, n in enumerate(lengths if unit != 3 else [])]
        splits = [rng.choice([0, 0, 1]) for _ in texts]
        used = np.array([rng.choice([0, 1, 1, 2, 3]) for _ in texts], np.uint16)
        tables.append(write_unit(tmp_path, unit, texts, splits))
        copies.append(used)
        documents += texts
        chosen += [0 if split else int(n) for split, n in zip(splits, used, strict=True)]
    copy_order = [
        (copy, document)
        for copy in range(3)
        for document, times in zip(documents, chosen, strict=True)
        if times > copy
    ]
    if by_length:
        copy_order.sort(key=lambda pair: -(len(pair[1]).bit_length()))
        buckets = [len(document).bit_length() for _, document in copy_order]
        assert buckets == sorted(buckets, reverse=True)
    stream = np.concatenate([document for _, document in copy_order])
    begins = np.cumsum([0, *(len(document) for _, document in copy_order)])[:-1]
    owner_length = np.repeat(*([[len(d) for _, d in copy_order]] * 2))
    runs = lay_out(tables, copies, 0, by_length)
    total = runs[-1].start + runs[-1].tokens
    assert total == len(stream)
    first_row, firsts = 0, 0
    while first_row < total // row_tokens:  # in shards of some rows, as the tasks make them
        count = min(rng.randrange(1, 9), total // row_tokens - first_row)
        rows = read_rows(runs, first_row, count, row_tokens, "uint16")
        low, high = first_row * row_tokens, (first_row + count) * row_tokens
        np.testing.assert_array_equal(rows.tokens.ravel(), stream[low:high])
        expected = begins[(begins >= low) & (begins < high)] - low
        np.testing.assert_array_equal(rows.begins, expected)
        longest = owner_length[low:high].reshape(count, row_tokens).max(axis=1)
        np.testing.assert_array_equal(rows.longest, longest)
        firsts += rows.firsts
        first_row += count
    in_tail = list(names_from(runs, first_row * row_tokens))
    assert firsts + len(in_tail) == sum(n > 0 for n in chosen)


def test_nothing_in_nothing_out(tmp_path: Path) -> None:
    assert lay_out([], [], 0, by_length=False) == []
    tables = [write_unit(tmp_path, 0, [], [])]
    assert lay_out(tables, ones(tables), 0, by_length=True) == []


def test_buckets_are_powers_of_two_exactly() -> None:
    lengths = np.array([1, 2, 3, 4, 7, 8, (1 << 40) - 1, 1 << 40])
    assert bucket_of(lengths).tolist() == [0, 1, 1, 2, 2, 3, 39, 40]
