import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_prep.mqar import MqarTask
from data_prep.synth import write_task
from eval.mqar import check, mqar
from eval.result import Options

V, T, PAIRS, ROWS = 64, 24, 3, 11


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mqar") / "set"
    task = MqarTask(seq_len=T, pairs=PAIRS, vocab_size=V, random_non_queries=False)
    write_task(task, folder, rows=5, validation_rows=ROWS, seed=0)
    return folder


def recall(tokens):
    """The answer by rule: what stood after this token where it first stood, among the pairs."""
    out = torch.zeros_like(tokens)
    for row, ids in enumerate(tokens.tolist()):
        table = dict(zip(ids[0 : 2 * PAIRS : 2], ids[1 : 2 * PAIRS : 2], strict=True))
        out[row] = torch.tensor([table.get(token, 0) for token in ids])
    return out


def sized(subject, model, vocab_size=V, max_seq_len=T):
    return replace(subject(model), vocab_size=vocab_size, max_seq_len=max_seq_len, tokenizer=None)


def run(subject, model, dataset):
    return {r.metric: r for r in mqar(sized(subject, model), Options(dataset=dataset))}


def test_recall_by_rule_is_always_right(subject, certain, rows):
    got = run(subject, certain(V, recall), rows)
    assert got["accuracy"].value == got["sequence_accuracy"].value == 100
    assert got["nll_per_label"].value == 0
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
    assert got["nll_per_label"].value == pytest.approx(math.log(V), rel=1e-6)


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
    model, options = uniform(V), Options(dataset=rows)
    check(sized(subject, model), options)
    with pytest.raises(ValueError, match="got 64; expected at most 32"):
        check(sized(subject, model, vocab_size=32), options)
    with pytest.raises(ValueError, match="got 24 tokens"):
        check(sized(subject, model, max_seq_len=16), options)
    with pytest.raises(ValueError, match="kind 'text'"):
        check(sized(subject, model), Options(dataset=dataset))
    with pytest.raises(ValueError, match="add --dataset"):
        check(sized(subject, model), Options())
    with pytest.raises(ValueError, match="no split 'test'"):
        check(sized(subject, model), Options(dataset=rows, split="test"))


def test_missing_shard_is_refused_before_the_run(subject, uniform, rows, tmp_path):
    damaged = tmp_path / "set"
    shutil.copytree(rows, damaged)
    shard = next((damaged / "validation").glob("*.mds"))
    shard.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=shard.name):
        check(sized(subject, uniform(V)), Options(dataset=damaged))


@pytest.mark.parametrize("variant", ["zoology", "adaptive-decay"])
def test_rows_are_drawn_for_every_length_and_number_of_pairs(subject, certain, variant):
    options = Options(
        pairs=(2, 3), lengths=(24, 40), variant=variant, task_vocab_size=V, samples=9, seed=4
    )
    model = sized(subject, certain(V, recall), max_seq_len=40)
    check(model, options)
    results = [r for r in mqar(model, options) if r.metric == "accuracy"]
    cells = [(r.settings["length"], r.settings["pairs"], r.count) for r in results]
    assert cells == [(24, 2, 9), (24, 3, 9), (40, 2, 9), (40, 3, 9)]
    assert {r.settings["variant"] for r in results} == {variant}
    assert [r.value for r in results if r.settings["pairs"] == PAIRS] == [100, 100]


def test_rows_that_cannot_be_drawn_are_refused(subject, uniform):
    model = sized(subject, uniform(V))
    with pytest.raises(ValueError, match="even number of at least 32"):
        check(model, Options(pairs=(8,), task_vocab_size=V))
    with pytest.raises(ValueError, match="got 128; expected at most 64"):
        check(model, Options(pairs=(2,), task_vocab_size=128))
    with pytest.raises(ValueError, match="got 48 tokens"):
        check(model, Options(pairs=(2,), lengths=(48,), task_vocab_size=V))
    with pytest.raises(ValueError, match="unknown variant of MQAR: got s4"):
        check(model, Options(pairs=(2,), variant="s4"))


def test_rows_beyond_the_training_are_scored_when_asked_for_and_marked(subject, uniform):
    model = replace(sized(subject, uniform(V), max_seq_len=48), trained_length=T)
    options = Options(pairs=(2,), lengths=(T, 48), task_vocab_size=V, samples=4)
    with pytest.raises(ValueError, match="longer than the rows the model was trained on: got 48"):
        check(model, options)
    model = replace(model, beyond_trained=True)
    check(model, options)
    marks = {r.settings["length"]: r.settings.get("trained_length") for r in mqar(model, options)}
    assert marks == {T: None, 48: T}
