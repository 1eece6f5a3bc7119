import re

import pytest
import torch

from eval.niah import NOISE, contains, grade, make_samples, niah, prompt_text, teacher_forced
from eval.result import Options

LENGTH, ANSWER = 700, 24


@pytest.fixture(scope="module")
def samples(tokenizer):
    return make_samples(tokenizer, length=LENGTH, answer_tokens=ANSWER, samples=30, seed=5)


def values(results):
    return {result.metric: result.value for result in results}


def test_needle_stands_once_and_the_absent_value_nowhere(samples):
    for sample in samples:
        assert sample.prompt.count(sample.value) == 1
        assert sample.absent not in sample.prompt
        assert re.fullmatch(r"[1-9]\d{6}", sample.value)
        needle = f"magic numbers for (\\w+-\\w+) is: {sample.value}\\."
        key = re.search(needle, sample.prompt).group(1)
        assert sample.prompt.endswith(
            f"The special magic number for {key} mentioned in the provided text is"
        )


def test_prompt_fills_its_budget_to_within_one_noise_line(samples, tokenizer):
    for sample in samples:
        assert sample.tokens == [tokenizer.bos_id, *tokenizer.encode(sample.prompt)]
        assert len(sample.tokens) + ANSWER <= LENGTH
        longer = sample.prompt.replace(NOISE, f"{NOISE}\n{NOISE}", 1)
        assert len(tokenizer.encode(longer)) + 1 + ANSWER > LENGTH


def test_needle_stands_where_the_depth_says():
    lines = prompt_text("a-b", "1234567", 4, 3).split("\n")
    assert [NOISE in line for line in lines] == [False, True, True, True, False, True, False]
    depths = {prompt_text("a-b", "1234567", 4, i).index("1234567") for i in range(5)}
    assert len(depths) == 5


def test_samples_depend_on_seed_and_length_alone(tokenizer, samples):
    def make(length, seed, n):
        return make_samples(tokenizer, length=length, answer_tokens=ANSWER, samples=n, seed=seed)

    assert make(LENGTH, 5, 30) == samples
    assert make(LENGTH, 5, 3) == samples[:3]
    assert make(LENGTH, 6, 3) != samples[:3]
    assert {s.depth for s in samples} != {samples[0].depth}


def test_oracle_scores_100_and_silence_0(samples):
    options = Options(answer_tokens=ANSWER)
    needle = re.compile(r"is: (\d+)\.")
    oracle = [f" {needle.search(s.prompt).group(1)}.\n" for s in samples]
    assert values(grade(samples, oracle, LENGTH, options))["accuracy"] == 100
    assert values(grade(samples, [""] * len(samples), LENGTH, options))["accuracy"] == 0
    half = [a if i % 2 else "7654321 1112223 7654321" for i, a in enumerate(oracle)]
    got = values(grade(samples, half, LENGTH, options))
    assert got["accuracy"] == 50
    assert got["numbers_emitted"] == 1.5


def test_matching_ignores_case_and_what_stands_around():
    assert contains("the Number is\x0012345678, so", "2345678")
    assert contains("ABC", "abc")
    assert not contains("1234 567", "1234567")


def test_model_that_knows_the_value_gains_from_the_text(samples, tokenizer, subject, stand_in):
    """An oracle for the teacher-forced scores: after the prompt, all mass on the true value."""
    answers = {tuple(s.tokens): tokenizer.encode(f" {s.value}") for s in samples}

    def logits(tokens):
        out = torch.zeros(*tokens.shape, tokenizer.vocab_size)
        for row, ids in enumerate(tokens.tolist()):
            for prompt, answer in answers.items():
                if tuple(ids[: len(prompt)]) == prompt:
                    for i, token in enumerate(answer):
                        if len(prompt) - 1 + i < len(ids):
                            out[row, len(prompt) - 1 + i, token] = 50.0
        return out

    model = subject(stand_in(logits), max_seq_len=LENGTH)
    got = values(teacher_forced(model, tokenizer, samples, LENGTH, Options()))
    assert got["value_log_prob"] == pytest.approx(0, abs=1e-6)
    assert got["value_argmax_rate"] == 100
    assert got["absent_argmax_rate"] == 0
    assert got["retrieval_gain"] == got["value_log_prob"] - got["absent_log_prob"] > 10


def test_length_beyond_the_model_or_below_one_line_is_refused(subject, uniform, tokenizer):
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=LENGTH)
    with pytest.raises(ValueError, match="got 701 tokens"):
        niah(model, Options(lengths=(600, 701)))
    with pytest.raises(ValueError, match="too short: got 100 tokens; expected at least"):
        niah(model, Options(lengths=(100,)))
