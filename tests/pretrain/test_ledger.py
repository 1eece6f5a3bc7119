"""A ledger of row ids: killed and moved between numbers of ranks, an epoch has every row once.

The part that reads, without a model: ranks are processes that write down the rows of each update
and are killed at any moment; as after a checkpoint, the next start is at the update up to which all
of them have come.
"""

import json
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.config import RunConfig
from pretrain.data import training_batches, training_rows
from tests.packed_rows import publish_rows

PACKED_ROWS, ROW_TOKENS, SEQ_LEN, BATCH_ROWS = 60, 64, 16, 8
ROWS = PACKED_ROWS * ROW_TOKENS // SEQ_LEN
KILLS = 10


def write_numbered(folder: Path, packed_rows: int, first: int) -> None:
    """A data set in which the first token of every row of SEQ_LEN tokens is the row's id."""
    pieces = ROW_TOKENS // SEQ_LEN

    def numbered(row: int) -> tuple[np.ndarray, np.ndarray]:
        ids = first + row * pieces + np.arange(pieces)
        return np.repeat(ids, SEQ_LEN), np.array([0])

    publish_rows(folder, map(numbered, range(packed_rows)), ROW_TOKENS, shard_bytes=1000)


@pytest.fixture
def config(settings: dict[str, Any], tmp_path: Path) -> RunConfig:
    write_numbered(tmp_path / "numbered", PACKED_ROWS, 0)
    settings["data"] = {"dataset": tmp_path / "numbered", "seq_len": SEQ_LEN, "shuffle_seed": 4}
    settings["batch"] = {"batch_tokens": BATCH_ROWS * SEQ_LEN, "micro_batch_rows": 1}
    settings["training"]["total_steps"] = 2 * ROWS // BATCH_ROWS
    return RunConfig.model_validate(settings)


def read(config: RunConfig, rank: int, ranks: int, first_update: int, ledger: Path) -> None:
    """What a rank does: a line [update, ids] for each update."""
    rows = training_rows(config.data)
    with ledger.open("a", buffering=1) as file:
        for number, batches in enumerate(training_batches(rows, config, rank, ranks, first_update)):
            ids = [int(row[0]) for batch in batches for row in batch.tokens]
            file.write(json.dumps([first_update + number, ids]) + "\n")
            time.sleep(0.002)


def lines_of(ledger: Path) -> dict[int, list[int]]:
    """The updates that were written down to their end."""
    whole = ledger.read_text().rpartition("\n")[0] if ledger.exists() else ""
    return dict(json.loads(line) for line in whole.splitlines())


def run_and_kill(
    config: RunConfig, ranks: int, first_update: int, folder: Path, most: int | None
) -> dict[int, list[int]]:
    """The updates that all ranks finished before they were killed, with their row ids.

    most: kill when rank 0 has come so many updates further; None lets them finish.
    """
    context = multiprocessing.get_context("fork")
    ledgers = [folder / f"{first_update}-{ranks}-{rank}" for rank in range(ranks)]
    for ledger in ledgers:
        ledger.unlink(missing_ok=True)
    processes = [
        context.Process(target=read, args=(config, rank, ranks, first_update, ledger))
        for rank, ledger in enumerate(ledgers)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    while most is not None and time.monotonic() < deadline:
        if len(lines_of(ledgers[0])) >= most:
            for process in processes:
                process.kill()  # one that has ended by itself is none to complain of
            break
        time.sleep(0.001)
    for process in processes:
        process.join(120)
    found = [lines_of(ledger) for ledger in ledgers]
    done = set.intersection(*(set(updates) for updates in found))
    return {update: [i for updates in found for i in updates[update]] for update in done}


def test_every_row_once_an_epoch_through_kills_and_changing_ranks(
    config: RunConfig, tmp_path: Path
) -> None:
    rng = random.Random(1)
    ledger: dict[int, list[int]] = {}
    for kill in range(KILLS):
        ranks = rng.choice([1, 2, 4]) if kill > 2 else (1, 2, 4)[kill]
        finished = run_and_kill(config, ranks, len(ledger), tmp_path, rng.randrange(1, 6))
        ledger.update(finished)
        assert sorted(ledger) == list(range(len(ledger)))
    ledger.update(run_and_kill(config, 2, len(ledger), tmp_path, None))
    updates = ROWS // BATCH_ROWS
    assert sorted(ledger) == list(range(2 * updates))
    orders = []
    for epoch in range(2):
        orders.append([i for u in range(epoch * updates, (epoch + 1) * updates) for i in ledger[u]])
        assert Counter(orders[-1]) == Counter(range(ROWS))
    assert orders[0] != orders[1]
    whole = run_and_kill(config, 1, 0, tmp_path, None)
    assert {update: sorted(ids) for update, ids in whole.items()} == {
        update: sorted(ids) for update, ids in ledger.items()
    }


def test_mixed_data_sets_read_the_same_rows_on_any_number_of_ranks(
    config: RunConfig, tmp_path: Path
) -> None:
    write_numbered(tmp_path / "other", 5, ROWS)
    tree = config.model_dump()
    tree["data"]["weight"] = 3
    tree["data"]["mixed_with"] = [{"dataset": tmp_path / "other", "weight": 1}]
    mixed = RunConfig.model_validate(tree)
    one, four = (run_and_kill(mixed, ranks, 0, tmp_path, None) for ranks in (1, 4))
    assert one == four
    read = [i for ids in one.values() for i in ids]
    assert abs(sum(i >= ROWS for i in read) / len(read) - 0.25) < 0.02
    counts = Counter(i for i in read if i >= ROWS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == 5 * ROW_TOKENS // SEQ_LEN
