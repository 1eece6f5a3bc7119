from dataclasses import replace

import pytest

from data_prep.selective_copy import SelectiveCopyTask
from data_prep.synth import write_task
from eval.result import Options
from eval.selective_copying import check, selective_copying
from eval.selftest_models import CopyOracle


def values(results):
    return {r.metric: r.value for r in results}


@pytest.mark.parametrize(("variant", "vocab_size"), [("s4", 16), ("adaptive-decay", 128)])
def test_repeating_by_rule_is_always_right(subject, variant, vocab_size):
    task = SelectiveCopyTask(seq_len=32, copied=4, vocab_size=vocab_size, variant=variant)
    model = replace(subject(CopyOracle(task)), vocab_size=vocab_size, tokenizer=None)
    options = Options(pairs=(4,), lengths=(32,), variant=variant, samples=12)
    check(model, options)
    got = values(selective_copying(model, options))
    assert got["accuracy"] == got["sequence_accuracy"] == 100


def test_one_wrong_token_lowers_tokens_by_a_part_and_sequences_wholly(subject, stand_in):
    task = SelectiveCopyTask(seq_len=32, copied=4)

    def last_is_wrong(tokens):
        logits = CopyOracle(task)(tokens)
        logits[:, -1] = 0
        return logits

    model = replace(subject(stand_in(last_is_wrong)), vocab_size=16, tokenizer=None)
    got = values(selective_copying(model, Options(pairs=(4,), lengths=(32,), samples=9)))
    assert got["accuracy"] == 75
    assert got["sequence_accuracy"] == 0


def test_rows_of_a_data_set_are_scored_and_other_kinds_refused(subject, tmp_path, dataset):
    task = SelectiveCopyTask(seq_len=32, copied=4)
    write_task(task, tmp_path / "c", rows=3, validation_rows=5, seed=0)
    model = replace(subject(CopyOracle(task)), vocab_size=16, tokenizer=None)
    options = Options(dataset=tmp_path / "c")
    check(model, options)
    results = selective_copying(model, options)
    assert values(results)["accuracy"] == 100
    assert results[0].settings["copied"] == 4
    assert results[0].settings["variant"] == "s4"
    with pytest.raises(ValueError, match="kind 'text'"):
        check(model, Options(dataset=dataset))
    with pytest.raises(ValueError, match="add --dataset DATASET or --pairs"):
        check(model, Options())
