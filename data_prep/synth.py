"""Synthetic tasks written as data sets, so that the trainer reads them like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.dataset_folder import building, finished, publish, remove
from data_prep.mqar import MqarTask, draw_rows
from data_prep.shards import Manifest, SettingValue, ShardWriter, SplitFacts, token_dtype


def write_mqar(
    task: MqarTask, output: Path, *, rows: int, validation_rows: int, seed: int
) -> tuple[Manifest, bool]:
    """Write MQAR rows unless they are there already; returns (manifest, made now).

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
    if (manifest := finished(output, "mqar", settings)) is not None:
        return manifest, False
    counts = {"train": rows, "validation": validation_rows}
    with building(output) as work:
        splits = {
            split: _write_split(task, work / split, split, count, seed)
            for split, count in counts.items()
            if count
        }
        manifest = Manifest(
            kind="mqar",
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


def _write_split(task: MqarTask, folder: Path, split: str, rows: int, seed: int) -> SplitFacts:
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
