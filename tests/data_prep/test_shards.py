from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from streaming import MDSWriter

from data_prep.dataset_folder import building, publish
from data_prep.mds_shard import write_mds_shard
from data_prep.shards import (
    IGNORED_LABEL,
    Manifest,
    Rows,
    ShardWriter,
    SkippedDocuments,
    SplitFacts,
    next_token_labels,
    read_manifest,
    token_dtype,
)

ROWS, ROW_TOKENS = 50, 32


def expected_row(index: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    starts = np.union1d([0], rng.integers(0, ROW_TOKENS, index % 4))
    return rng.integers(0, 1000, ROW_TOKENS), starts


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """50 rows of 32 tokens in several shards."""
    folder = tmp_path / "dataset"
    with building(folder) as work:
        writer = ShardWriter(
            work / "train", row_tokens=ROW_TOKENS, vocab_size=1000, shard_bytes=2000
        )
        for i in range(ROWS):
            writer.write(*expected_row(i))
        facts = SplitFacts(
            rows=ROWS,
            tokens=ROWS * ROW_TOKENS,
            documents=ROWS,
            bytes=0,
            dropped_tokens={"tail": 3},
            index_sha256=writer.finish(),
        )
        publish(folder, manifest_of({"train": facts}), tokenizer_model=None)
    return folder


def manifest_of(splits: dict[str, SplitFacts], **changes: object) -> Manifest:
    fields = {
        "kind": "text",
        "tokenizer_sha256": None,
        "vocab_size": 1000,
        "row_tokens": ROW_TOKENS,
        "dtype": "uint16",
        "splits": splits,
        "documents_in": ROWS,
        "skipped": {},
        "inputs": [],
        "settings": {},
        "seed": 0,
    }
    return Manifest.model_validate(fields | changes)


def test_rows_come_back_as_written_in_any_order(dataset: Path) -> None:
    rows = Rows(dataset, "train")
    assert len(rows) == ROWS
    assert len(list((dataset / "train").glob("*.mds"))) > 2
    for i in np.random.default_rng(0).permutation(ROWS):
        tokens, starts = expected_row(int(i))
        row = rows[int(i)]
        assert np.array_equal(row.tokens, tokens)
        assert np.array_equal(row.document_starts, starts)
        for array in (row.tokens, row.labels, row.document_starts):
            assert array.dtype == np.int64
            assert array.flags.writeable
    for i in (-1, ROWS):
        with pytest.raises(IndexError, match=f"got {i}; expected 0 to 49"):
            rows[i]


def test_labels_are_the_next_token_of_the_same_document() -> None:
    tokens = np.array([7, 8, 9, 4, 5, 6])
    labels = next_token_labels(tokens, np.array([0, 3, 5]))
    assert labels.tolist() == [8, 9, IGNORED_LABEL, 5, IGNORED_LABEL, IGNORED_LABEL]
    assert next_token_labels(tokens, np.array([0])).tolist() == [8, 9, 4, 5, 6, IGNORED_LABEL]


def test_equal_rows_give_equal_files(dataset: Path, tmp_path: Path) -> None:
    writer = ShardWriter(
        tmp_path / "again", row_tokens=ROW_TOKENS, vocab_size=1000, shard_bytes=2000
    )
    for i in range(ROWS):
        writer.write(*expected_row(i))
    assert writer.finish() == read_manifest(dataset).splits["train"].index_sha256
    for path in (dataset / "train").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_our_shard_is_that_of_streamings_writer(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 60000, (4, 70000)).astype(dtype)
    starts = [np.arange(n) for n in (1, 255, 256, 66000)]
    entry = write_mds_shard(tmp_path / "shard.00000.mds", tokens, starts)
    columns = {"tokens": f"ndarray:{dtype}:70000", "document_starts": "ndarray:uint32"}
    out = str(tmp_path / "theirs")
    with MDSWriter(out=out, columns=columns, hashes=["sha256"], size_limit=None) as writer:
        for row, begins in zip(tokens, starts, strict=True):
            writer.write({"tokens": row, "document_starts": begins.astype("uint32")})
    ours = (tmp_path / "shard.00000.mds").read_bytes()
    assert ours == (tmp_path / "theirs" / "shard.00000.mds").read_bytes()
    index = json.loads((tmp_path / "theirs" / "index.json").read_text())
    assert index["shards"] == [entry]


def test_reading_leaves_no_shared_memory_and_no_open_file(dataset: Path) -> None:
    def traces() -> tuple[set[str], int]:
        shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        return {n for n in shared if n.startswith("0")}, len(os.listdir("/proc/self/fd"))

    before = traces()
    rows = Rows(dataset, "train")
    assert [rows[i].tokens.size for i in range(ROWS)] == [ROW_TOKENS] * ROWS
    assert traces() == before


def test_loader_workers_and_pickled_copies_read_the_same_rows(dataset: Path) -> None:
    rows = Rows(dataset, "train")
    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    read = [row.tokens for row in loader]
    copy = pickle.loads(pickle.dumps(rows))
    assert len(read) == ROWS
    for i in range(ROWS):
        assert np.array_equal(read[i], rows[i].tokens)
        assert np.array_equal(copy[i].tokens, rows[i].tokens)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_shard_is_named_with_the_hash_that_was_expected(
    dataset: Path, damage: str
) -> None:
    path = sorted((dataset / "train").glob("*.mds"))[1]
    entry = json.loads((dataset / "train" / "index.json").read_text())["shards"]
    sha256 = entry[1]["raw_data"]["hashes"]["sha256"]
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-3] ^= 4
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    rows = Rows(dataset, "train")
    assert rows[0].tokens.size == ROW_TOKENS  # another shard, unharmed
    first_bad = entry[0]["samples"]
    problem = FileNotFoundError if damage == "remove" else ValueError
    for attempt in (lambda: rows[first_bad], rows.verify):
        with pytest.raises(problem, match=f"{path.name} is (damaged|missing): .*sha256 {sha256}"):
            attempt()


def test_a_changed_index_and_foreign_columns_are_refused(dataset: Path) -> None:
    index = dataset / "train" / "index.json"
    text = index.read_text()
    index.write_text(text.replace("ndarray:uint32", "pkl"))
    with pytest.raises(ValueError, match=r"index\.json is damaged: got sha256"):
        Rows(dataset, "train")
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["splits"]["train"]["index_sha256"] = hashlib.sha256(index.read_bytes()).hexdigest()
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"index\.json is not ours: got columns \['pkl'"):
        Rows(dataset, "train")


def test_missing_parts_of_a_data_set_are_named(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no split 'validation': got train"):
        Rows(dataset, "validation")
    with pytest.raises(FileNotFoundError, match=r"is not a data set: got no manifest\.json"):
        read_manifest(tmp_path)
    path = dataset / "manifest.json"
    text = path.read_text()
    for wrong, message in (
        (text.replace('"format_version": 1', '"format_version": 9'), "format_version: "),
        (text[:-20], "expected format version 1; pack the data set again"),
        (text.replace('"seed"', '"sead"'), "sead: |seed: "),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            read_manifest(dataset)


def test_a_manifest_whose_documents_do_not_add_up_cannot_be_made() -> None:
    skipped = {"empty": SkippedDocuments(count=2, examples=["a"])}
    assert manifest_of({}, documents_in=2, skipped=skipped).documents_in == 2
    with pytest.raises(ValueError, match="documents do not add up: got 3 in; expected 0 written"):
        manifest_of({}, documents_in=3, skipped=skipped)


def test_the_column_type_is_the_narrowest_that_holds_the_vocabulary() -> None:
    assert [token_dtype(n) for n in (256, 65536, 65537)] == ["uint16", "uint16", "uint32"]
