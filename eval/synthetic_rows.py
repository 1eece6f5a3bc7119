"""Accuracy on synthetic rows whose labels stand at the position that predicts them.

Rows come from a data set (`--dataset`), or are drawn: the "test" stream of the seed, which no data
set of training or validation rows shares. Metrics, each per length and per number of scored labels
in a row (pairs, copied tokens); rows with different numbers are never averaged together:

    accuracy            percent of labels that are the argmax over the whole vocabulary
    sequence_accuracy   percent of rows in which every label is
    nll_per_label       nats
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.shards import Rows, read_manifest
from data_prep.synth import SyntheticTask, draw_rows
from eval.result import Options, Result, Subject, mean_result
from eval.samples import Values
from eval.scoring import row_batches, score

VERSION = 2
PAIRED = ("accuracy", "sequence_accuracy", "nll_per_label")

Draw = Callable[[Subject, Options, int, int], SyntheticTask]
"""(subject, options, length, number) -> the task whose rows are drawn."""
LabelledRow = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """What tells MQAR and selective copying apart here."""

    name: str
    """In TASKS and in a data set's manifest."""
    number: str
    """What the labels of a row count: a name in `settings`."""
    draw: Draw


def check(kind: Kind, subject: Subject, options: Options) -> None:
    """Refuse a missing, damaged or foreign data set, settings of rows that cannot be, and rows that
    the model cannot read."""
    if options.dataset is not None:
        _open_rows(kind, subject, options).verify()
        return
    for task in _tasks(kind, subject, options):
        _check_vocabulary(f"a row of {kind.name}", task.vocab_size, subject)
        subject.check_length(f"a row of {kind.name}", task.seq_len)


def run(kind: Kind, subject: Subject, options: Options) -> list[Result]:
    """All metrics of the module's text."""
    if options.dataset is not None:
        return _dataset_results(kind, subject, options)
    results = []
    for task in _tasks(kind, subject, options):
        settings = {**task.settings(), "split": "test", "seed": options.seed}
        rows = [
            (tokens, labels, np.zeros(1, np.int64))
            for tokens, labels in draw_rows(task, options.samples, split="test", seed=options.seed)
        ]
        values = _scored(kind, subject, options, rows.__getitem__, len(rows), settings)
        settings |= subject.length_mark(task.seq_len)
        results += _results(kind, values, settings)
    return results


def _tasks(kind: Kind, subject: Subject, options: Options) -> list[SyntheticTask]:
    if not options.pairs:
        raise ValueError(
            f"task {kind.name} has no rows: got neither --dataset nor --pairs; expected the output "
            f"of `python -m data_prep synth {kind.name}`, or numbers of {kind.number} to draw rows "
            "for; add --dataset DATASET or --pairs 4,8"
        )
    lengths = options.lengths or (subject.usual_length,)
    return [
        kind.draw(subject, options, length, number)
        for length in lengths
        for number in options.pairs
    ]


def _check_vocabulary(what: str, vocab_size: int, subject: Subject) -> None:
    if vocab_size > subject.vocab_size:
        raise ValueError(
            f"vocabulary of {what} is larger than the model's: got {vocab_size}; expected at most "
            f"{subject.vocab_size}; make the rows with a smaller --vocab-size"
        )


def _open_rows(kind: Kind, subject: Subject, options: Options) -> Rows:
    assert options.dataset is not None
    manifest = read_manifest(options.dataset)
    if manifest.kind != kind.name:
        raise ValueError(
            f"task {kind.name} reads its own rows: got a data set of kind {manifest.kind!r} in "
            f"{options.dataset}; expected kind {kind.name!r}; make one with "
            f"`python -m data_prep synth {kind.name}`"
        )
    _check_vocabulary(str(options.dataset), manifest.vocab_size, subject)
    subject.check_length(f"a row of {options.dataset}", manifest.row_tokens)
    return Rows(options.dataset, options.split)


def _dataset_results(kind: Kind, subject: Subject, options: Options) -> list[Result]:
    rows = _open_rows(kind, subject, options)

    def row(place: int) -> LabelledRow:
        found = rows[place]
        return found.tokens, found.labels, found.document_starts

    manifest = rows.manifest
    settings: dict[str, Any] = {
        "dataset": str(options.dataset),
        "rows_sha256": manifest.splits[options.split].index_sha256,
        "variant": manifest.settings.get("variant"),
        "split": options.split,
        "seq_len": manifest.row_tokens,
        "vocab_size": manifest.vocab_size,
        "seed": manifest.seed,
    }
    values = _scored(kind, subject, options, row, len(rows), settings)
    return _results(kind, values, {**settings, **subject.length_mark(manifest.row_tokens)})


def _scored(
    kind: Kind,
    subject: Subject,
    options: Options,
    row: Callable[[int], LabelledRow],
    count: int,
    settings: dict[str, Any],
) -> list[Values]:
    def score_rows(places: list[int]) -> Iterator[Values]:
        batches = row_batches(map(row, places), options.batch_tokens)
        for one in score(subject.model, batches, subject.device):
            yield {
                "labels": one.tokens,
                "accuracy": 100 * one.hits / one.tokens,
                "sequence_accuracy": 100.0 * (one.hits == one.tokens),
                "nll_per_label": one.nll / one.tokens,
            }

    log = subject.samples.open(kind.name, VERSION, settings)
    what = f"{kind.name} {settings['seq_len']}"
    values = log.scored([str(i) for i in range(count)], score_rows, what)
    log.close()
    return values


def _results(kind: Kind, values: Sequence[Values], settings: dict[str, Any]) -> list[Result]:
    by_number: dict[int, list[Values]] = {}
    for one in values:
        by_number.setdefault(one["labels"], []).append(one)
    units = dict(zip(PAIRED, ("percent", "percent", "nats"), strict=True))
    return [
        mean_result(
            kind.name,
            VERSION,
            metric,
            np.array([one[metric] for one in group], dtype=np.float64),
            unit,
            {**settings, kind.number: number, "length": settings["seq_len"], "rows": len(group)},
        )
        for number, group in sorted(by_number.items())
        for metric, unit in units.items()
    ]
