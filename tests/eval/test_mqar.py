import math

import numpy as np
import pytest
import torch

from data_prep.mqar import MqarTask
from data_prep.synth import write_mqar
from eval.mqar import mqar
from eval.result import Options

V, T, PAIRS, ROWS = 64, 24, 3, 11


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mqar") / "set"
    task = MqarTask(seq_len=T, pairs=PAIRS, vocab_size=V, random_non_queries=False)
    write_mqar(task, folder, rows=5, validation_rows=ROWS, seed=0)
    return folder


def recall(tokens):
    """The answer by rule: what stood after this token where it first stood, among the pairs."""
    out = torch.zeros_like(tokens)
    for row, ids in enumerate(tokens.tolist()):
        table = dict(zip(ids[0 : 2 * PAIRS : 2], ids[1 : 2 * PAIRS : 2], strict=True))
        out[row] = torch.tensor([table.get(token, 0) for token in ids])
    return out


def run(subject, model, dataset, **changes):
    size = {"vocab_size": V, "max_seq_len": T, **changes}
    base = subject(model, max_seq_len=size["max_seq_len"])
    base = type(base)(
        model=model,
        vocab_size=size["vocab_size"],
        max_seq_len=size["max_seq_len"],
        tokenizer=None,
        device="cpu",
    )
    return {r.metric: r for r in mqar(base, Options(dataset=dataset))}


def test_recall_by_rule_is_always_right(subject, certain, rows):
    got = run(subject, certain(V, recall), rows)
    assert got["accuracy"].value == got["sequence_accuracy"].value == 100
    assert got["nll_per_query"].value == 0
    assert got["accuracy"].count == ROWS
    assert got["accuracy"].settings["pairs"] == PAIRS


def test_answer_one_place_late_is_wrong(subject, certain, rows):
    """Targets are read at the query's own position; a shifted label would accept this."""
    got = run(subject, certain(V, lambda tokens: recall(tokens).roll(1, dims=1)), rows)
    assert got["accuracy"].value == 0


def test_one_key_wrong_lowers_tokens_by_a_part_and_sequences_wholly(subject, certain, rows):
    def forgets_first_key(tokens):
        out = recall(tokens)
        out[tokens == tokens[:, :1]] = 0
        return out

    got = run(subject, certain(V, forgets_first_key), rows)
    assert got["accuracy"].value == pytest.approx(100 * (PAIRS - 1) / PAIRS)
    assert got["sequence_accuracy"].value == 0


def test_uniform_model_has_log_vocab_size_per_query(subject, uniform, rows):
    got = run(subject, uniform(V), rows)
    assert got["nll_per_query"].value == pytest.approx(math.log(V), rel=1e-6)


def test_different_numbers_of_pairs_are_never_averaged(subject, uniform, rows, monkeypatch):
    from data_prep.shards import Rows

    original = Rows.__getitem__

    def fewer_in_row_0(self, index):
        row = original(self, index)
        if index == 0:
            row.labels[np.flatnonzero(row.labels != -100)[0]] = -100
        return row

    monkeypatch.setattr(Rows, "__getitem__", fewer_in_row_0)
    model = subject(uniform(V), max_seq_len=T)
    results = [r for r in mqar(model, Options(dataset=rows)) if r.metric == "accuracy"]
    assert [(r.settings["pairs"], r.count) for r in results] == [(2, 1), (3, ROWS - 1)]


def test_what_does_not_fit_is_refused(subject, uniform, rows, dataset):
    with pytest.raises(ValueError, match="got 64 .* expected at most 32"):
        run(subject, uniform(V), rows, vocab_size=32)
    with pytest.raises(ValueError, match="got 24 tokens"):
        run(subject, uniform(V), rows, max_seq_len=16)
    with pytest.raises(ValueError, match="kind 'text'"):
        run(subject, uniform(V), dataset)
    with pytest.raises(ValueError, match="add --dataset"):
        run(subject, uniform(V), None)
