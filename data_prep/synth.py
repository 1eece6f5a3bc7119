"""Synthetic tasks: rows that depend on a seed alone, drawn in memory or written as data sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep import mqar, selective_copy
from data_prep.dataset_folder import building, finished, publish, remove
from data_prep.mqar import MqarTask
from data_prep.selective_copy import SelectiveCopyTask
from data_prep.shards import Manifest, SettingValue, ShardWriter, SplitFacts, token_dtype

SyntheticTask = MqarTask | SelectiveCopyTask
MQAR, SELECTIVE_COPY = "mqar", "selective-copy"
BLOCK_ROWS = 512  # drawn together: bounds memory, and row n of a seed is the same for any row count
SPLIT_STREAM = {"train": 0, "validation": 1, "test": 2}


def kind_of(task: SyntheticTask) -> str:
    """The `kind` of a data set of such rows."""
    return MQAR if isinstance(task, MqarTask) else SELECTIVE_COPY


def draw_rows(
    task: SyntheticTask, rows: int, *, split: str, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`rows` pairs (tokens int64 [T], labels int64 [T]).

    Each split is its own stream of the seed, and row n is the same whatever `rows` is.
    """
    if split not in SPLIT_STREAM:
        raise ValueError(f"unknown split: got {split!r}; expected one of {', '.join(SPLIT_STREAM)}")
    for block in range(0, rows, BLOCK_ROWS):
        stream = np.random.SeedSequence(seed, spawn_key=(SPLIT_STREAM[split], block // BLOCK_ROWS))
        tokens, labels = draw_block(task, BLOCK_ROWS, np.random.default_rng(stream))
        yield from zip(tokens[: rows - block], labels[: rows - block], strict=True)


def draw_block(
    task: SyntheticTask, rows: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """tokens and labels, both int64 [rows, T]."""
    if isinstance(task, MqarTask):
        return mqar.draw_block(task, rows, rng)
    return selective_copy.draw_block(task, rows, rng)


def write_task(
    task: SyntheticTask, output: Path, *, rows: int, validation_rows: int, seed: int
) -> tuple[Manifest, bool]:
    """Write rows of a task unless they are there already; returns (manifest, made now).

    Raises ValueError in one line if the counts or the output folder do not fit.
    """
    if rows < 1 or validation_rows < 0:
        raise ValueError(
            f"rows do not fit: got {rows} to train and {validation_rows} to validate; expected at "
            "least 1 and 0"
        )
    settings: dict[str, SettingValue] = {
        **task.settings(),
        "rows": rows,
        "validation_rows": validation_rows,
        "seed": seed,
    }
    if (manifest := finished(output, kind_of(task), settings)) is not None:
        return manifest, False
    counts = {"train": rows, "validation": validation_rows}
    with building(output) as work:
        splits = {
            split: _write_split(task, work / split, split, count, seed)
            for split, count in counts.items()
            if count
        }
        manifest = Manifest(
            kind=kind_of(task),
            tokenizer_sha256=None,
            vocab_size=task.vocab_size,
            row_tokens=task.seq_len,
            dtype=token_dtype(task.vocab_size),
            splits=splits,
            documents_in=rows + validation_rows,
            skipped={},
            inputs=[],
            settings=settings,
            seed=seed,
        )
        publish(output, manifest, tokenizer_model=None)
    return manifest, True


def _write_split(task: SyntheticTask, folder: Path, split: str, rows: int, seed: int) -> SplitFacts:
    remove(folder)
    writer = ShardWriter(
        folder, row_tokens=task.seq_len, vocab_size=task.vocab_size, with_labels=True
    )
    start = np.zeros(1, np.int64)
    for tokens, labels in draw_rows(task, rows, split=split, seed=seed):
        writer.write(tokens, start, labels)
    return SplitFacts(
        rows=rows,
        tokens=rows * task.seq_len,
        documents=rows,
        bytes=0,
        dropped_tokens={},
        index_sha256=writer.finish(),
    )
