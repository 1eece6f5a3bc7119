"""Multi-query associative recall: accuracy at the query positions of a data set of kind "mqar".

Made by `python -m data_prep synth mqar` (generator and its source: data_prep/mqar.py; the task is
that of Zoology, arXiv 2312.04927). A row lists key-value pairs and later asks for each key once;
the target is the key's value and is predicted AT the query's own position, so nothing is shifted:

    tokens   k1 v1 k2 v2  .  k2  .  .  k1  .           .  filler
    labels    -  -  -  -  -  v2  -  -  v1  -           -  -100, not scored

Metrics, each per number of pairs (labels in a row; rows with different numbers are never averaged
together):
    accuracy            percent of queries whose argmax over the whole vocabulary is the value
    sequence_accuracy   percent of rows in which every query is right
    nll_per_query       nats
Chance is about 2 / vocab_size once a model knows that a value comes. One run says little: report
several seeds.
"""

from __future__ import annotations

import numpy as np

from data_prep.shards import Rows, read_manifest
from eval.progress import track
from eval.result import Options, Result, Subject, mean_result
from eval.scoring import Score, row_batches, score

VERSION = 1


def check(subject: Subject, options: Options) -> None:
    """Refuse a missing, damaged or foreign data set, and rows that the model cannot read."""
    _open_rows(subject, options).verify()


def _open_rows(subject: Subject, options: Options) -> Rows:
    if options.dataset is None:
        raise ValueError(
            "task mqar has no data set: got no --dataset; expected the output of "
            "`python -m data_prep synth mqar`; add --dataset DATASET"
        )
    manifest = read_manifest(options.dataset)
    if manifest.kind != "mqar":
        raise ValueError(
            f"task mqar reads MQAR rows: got a data set of kind {manifest.kind!r} in "
            f"{options.dataset}; expected kind 'mqar'; make one with "
            "`python -m data_prep synth mqar`"
        )
    if manifest.vocab_size > subject.vocab_size:
        raise ValueError(
            f"data set vocabulary is larger than the model's: got {manifest.vocab_size} in "
            f"{options.dataset}; expected at most {subject.vocab_size}; make the rows with a "
            "smaller --vocab-size"
        )
    subject.check_length(f"a row of {options.dataset}", manifest.row_tokens)
    return Rows(options.dataset, options.split)


def mqar(subject: Subject, options: Options) -> list[Result]:
    """All metrics of the module's text for the split `options.split` of `options.dataset`."""
    rows = _open_rows(subject, options)
    triples = (
        (row.tokens, row.labels, row.document_starts)
        for row in map(rows.__getitem__, range(len(rows)))
    )
    batches = row_batches(triples, options.batch_tokens)
    scores = track(score(subject.model, batches, subject.device), len(rows), "mqar")
    by_pairs: dict[int, list[Score]] = {}
    for one in scores:
        by_pairs.setdefault(one.tokens, []).append(one)
    settings = {
        "dataset": str(options.dataset),
        "split": options.split,
        "row_tokens": rows.manifest.row_tokens,
        "vocab_size": rows.manifest.vocab_size,
    }
    results = []
    for pairs, group in sorted(by_pairs.items()):
        hits = np.array([s.hits for s in group], dtype=np.float64)
        columns = (
            ("accuracy", 100 * hits / pairs, "percent"),
            ("sequence_accuracy", 100.0 * (hits == pairs), "percent"),
            ("nll_per_query", np.array([s.nll for s in group]) / pairs, "nats"),
        )
        results += [
            mean_result("mqar", VERSION, metric, values, unit, {**settings, "pairs": pairs})
            for metric, values, unit in columns
        ]
    return results
