"""The order of rows, the cut into ranks and micro-batches, and document borders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.shards import IGNORED_LABEL, Rows
from data_prep.training_rows import TrainingRows
from pretrain.config import RunConfig
from pretrain.data import (
    MicroBatch,
    rows_between,
    training_batches,
    validation_batches,
)
from pretrain.errors import TrainingFailed

NUM_ROWS = 20  # training rows of the small data set at seq_len 32
BATCH_ROWS = 4


@pytest.fixture
def rows(dataset: Path) -> TrainingRows:
    return TrainingRows(dataset, "train", seq_len=32)


def batches_of(
    settings: dict[str, Any], rows: TrainingRows, ranks: int = 1, first_update: int = 0
) -> list[list[MicroBatch]]:
    """Of every update: the micro-batches of all ranks, one rank after the other."""
    config = RunConfig.model_validate(settings)
    per_rank = [
        list(training_batches(rows, config, rank, ranks, first_update)) for rank in range(ranks)
    ]
    return [[batch for rank in update for batch in rank] for update in zip(*per_rank, strict=True)]


def tokens_of(batches: list[MicroBatch]) -> list[list[int]]:
    return torch.cat([batch.tokens for batch in batches]).tolist()


def test_every_row_is_read_once_in_an_epoch(rows: TrainingRows) -> None:
    read = rows_between(0, 3 * NUM_ROWS, rows, 7)
    epochs = [read[begin : begin + NUM_ROWS] for begin in range(0, 3 * NUM_ROWS, NUM_ROWS)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_ROWS))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_update_may_straddle_epochs(rows: TrainingRows) -> None:
    read = [row for i in range(7) for row in rows_between(6 * i, 6, rows, 7)]
    assert sorted(read[:NUM_ROWS]) == sorted(read[NUM_ROWS : 2 * NUM_ROWS])


def test_batch_larger_than_the_data_set_repeats_it(rows: TrainingRows) -> None:
    twice = sorted(rows_between(0, 2 * NUM_ROWS, rows, 0))
    assert twice == sorted(2 * list(range(NUM_ROWS)))


def test_order_depends_on_the_shuffle_seed(rows: TrainingRows) -> None:
    assert rows_between(0, NUM_ROWS, rows, 0) != rows_between(0, NUM_ROWS, rows, 1)


@pytest.mark.parametrize(("ranks", "micro_batch_rows"), [(1, 4), (2, 1), (2, 2), (4, 1)])
def test_rows_of_an_update_do_not_depend_on_ranks_or_micro_batches(
    settings: dict[str, Any], rows: TrainingRows, ranks: int, micro_batch_rows: int
) -> None:
    expected = [tokens_of(update) for update in batches_of(settings, rows)]
    settings["batch"]["micro_batch_rows"] = micro_batch_rows
    updates = batches_of(settings, rows, ranks)
    assert [tokens_of(update) for update in updates] == expected
    assert {len(batch.tokens) for update in updates for batch in update} == {micro_batch_rows}


@pytest.mark.parametrize("first_update", [1, 5, 9])
def test_resumed_loader_reads_what_an_unbroken_one_would(
    settings: dict[str, Any], rows: TrainingRows, first_update: int
) -> None:
    whole = [tokens_of(update) for update in batches_of(settings, rows)]
    rest = batches_of(settings, rows, first_update=first_update)
    assert [tokens_of(update) for update in rest] == whole[first_update:]


@pytest.mark.parametrize("threads", [0, 3, 20])
def test_loader_threads_change_nothing(
    settings: dict[str, Any], rows: TrainingRows, threads: int
) -> None:
    expected = [tokens_of(update) for update in batches_of(settings, rows)]
    settings["data"]["loader_threads"] = threads
    assert [tokens_of(update) for update in batches_of(settings, rows)] == expected


def test_cut_rows_hold_the_tokens_labels_and_documents_of_the_packed_ones(
    dataset: Path, rows: TrainingRows
) -> None:
    packed = Rows(dataset, "train")
    assert len(rows) == 2 * len(packed)
    for i in range(len(packed)):
        halves = rows[2 * i], rows[2 * i + 1]
        for name in ("tokens", "labels"):
            joined = np.concatenate([getattr(half, name) for half in halves])
            np.testing.assert_array_equal(joined, getattr(packed[i], name))
        starts = np.concatenate([halves[0].document_starts, halves[1].document_starts + 32])
        np.testing.assert_array_equal(starts, np.union1d(packed[i].document_starts, [32]))


def test_cu_seqlens_hold_every_row_start_and_every_document_start(
    settings: dict[str, Any], rows: TrainingRows
) -> None:
    settings["batch"]["micro_batch_rows"] = 4
    packed = 0
    for update in batches_of(settings, rows):
        for batch in update:
            last = batch.labels == IGNORED_LABEL  # the last token of every document that ends here
            ends = torch.nonzero(last.flatten()).flatten() + 1
            if batch.cu_seqlens is None:
                continue
            packed += 1
            borders = set(batch.cu_seqlens.tolist())
            assert borders >= {0, 32, 64, 96, 128}
            assert borders >= set(ends.tolist())
            assert borders <= set(ends.tolist()) | {0, 32, 64, 96, 128}
    assert packed


def test_rows_of_one_document_each_have_no_cu_seqlens(
    settings: dict[str, Any], rows: TrainingRows
) -> None:
    batches = [batch for update in batches_of(settings, rows) for batch in update]
    for batch in batches:
        inner_ends = (batch.labels[:, :-1] == IGNORED_LABEL).any()
        assert (batch.cu_seqlens is None) == (not inner_ends)
    assert {batch.cu_seqlens is None for batch in batches} == {True, False}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [1, 5, 100])
def test_validation_reads_each_row_once_in_equally_many_passes(
    settings: dict[str, Any], dataset: Path, ranks: int, wanted: int
) -> None:
    settings["validation"]["rows"] = wanted
    settings["batch"]["micro_batch_rows"] = 2
    config = RunConfig.model_validate(settings)
    rows = TrainingRows(dataset, "validation", seq_len=32)
    shares = [list(validation_batches(rows, config, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    read = [
        tokens
        for share in shares
        for batch in share
        if batch.valid_tokens
        for tokens in batch.tokens.tolist()
    ]
    chosen = {1: [0], 5: [0, 2, 4, 6, 8], 100: range(10)}[wanted]  # of 10
    expected = [rows[i].tokens.tolist() for i in chosen]
    assert sorted(read) == sorted(expected)


def test_damaged_shard_ends_the_run_and_is_named(
    settings: dict[str, Any], tmp_path: Path, dataset: Path
) -> None:
    copy = tmp_path / "damaged"
    for path in dataset.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(dataset)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (shard,) = (copy / "train").glob("*.mds")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(TrainingFailed, match=rf"rows cannot be read: {shard} is damaged"):
        batches_of(settings, TrainingRows(copy, "train", seq_len=32))
