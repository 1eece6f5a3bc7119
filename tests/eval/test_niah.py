import random
import re
import uuid
from collections import Counter
from dataclasses import replace

import pytest
import torch

from eval.niah import check, contains, grade, make_samples, niah, task_names, teacher_forced
from eval.niah_haystack import NOISE, Essays, sentence_ends
from eval.niah_samples import DEPTHS, RULER_TASKS, Draw, largest
from eval.result import Options
from eval.selftest import search_answer
from eval.words import ADJECTIVES, NOUNS

LENGTH, ANSWER = 1000, 24
NEEDLE = r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\."


@pytest.fixture(scope="session")
def essay_file(tmp_path_factory):
    """Sentences of our own, too few for the length: the text starts again."""
    rng = random.Random(3)
    sentences = [" ".join(rng.choices(NOUNS, k=8)).capitalize() + "." for _ in range(40)]
    path = tmp_path_factory.mktemp("haystack") / "essay.txt"
    path.write_text("\n\n".join(sentences), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def essays(essay_file):
    return Essays.load(essay_file)


def made(tokenizer, essays, name, samples, seed=5, length=LENGTH, answer_tokens=ANSWER):
    return make_samples(
        tokenizer,
        name,
        length=length,
        answer_tokens=answer_tokens,
        samples=samples,
        seed=seed,
        essays=essays,
    )


def check_sample(name, sample, tokenizer, essays, length=LENGTH):
    """Everything that the specification says of a sample, read from its text."""
    task = RULER_TASKS[name]
    # The prompt, piece by piece.
    one = task.queries * task.values == 1
    what = task.value[:-1] if one else task.value
    some, verb, every = ("A", "is", "is") if one else ("Some", "are", "are all")
    head = (
        f"{some} special magic {what} {verb} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {what} afterwards.\n"
    )
    assert sample.prompt.startswith(head)
    context, _, question = sample.prompt.removeprefix(head).rpartition("\n")
    match = re.fullmatch(
        rf"What {every} the special magic {what} for (.+) mentioned in the provided text\? "
        rf"The special magic {what} for (.+) mentioned in the provided text {verb}",
        question,
    )
    assert match is not None
    assert match[1] == match[2]
    asked = re.split(r", and |, ", match[1])
    assert len(asked) == task.queries

    # Needles: as many as the table says, keys and values all different.
    needles = re.findall(NEEDLE, context)
    assert {kind for kind, _, _ in needles} == {task.value}
    keys = Counter(key for _, key, _ in needles)
    values = [value for _, _, value in needles]
    assert len(set(values)) == len(values)
    lines = len(context.split("\n"))
    hidden = task.needles + (lines - task.needles if task.haystack == "needles" else 0)
    assert len(needles) == hidden
    if task.values == 1:
        assert set(keys.values()) == {1}
    assert set(asked) <= set(keys)
    for key, value in ((k, v) for _, k, v in needles):
        if task.key == "words":
            adjective, noun = key.split("-")
            assert adjective in ADJECTIVES
            assert noun in NOUNS
        else:
            assert str(uuid.UUID(key)) == key
        if task.value == "numbers":
            assert 1_000_000 <= int(value) <= 9_999_999
        else:
            assert uuid.UUID(value).version == 4

    # The answer: what stands under the asked keys, each once in the whole prompt; an absent value.
    assert sorted(sample.references) == sorted(search_answer(sample.prompt))
    assert len(sample.references) == task.queries * task.values
    for value in sample.references:
        assert sample.prompt.count(value) == 1
    assert sample.absent not in sample.prompt
    assert sample.references[0] not in sample.candidates

    # The haystack, and where the needles stand in it.
    if task.haystack == "essays":
        rest = re.sub(rf"{NEEDLE} ?", "", context).strip()
        words = rest.split(" ")
        assert words == (essays.words * (len(words) // len(essays.words) + 1))[: len(words)]
        for found in re.finditer(NEEDLE, context):
            before = context[: found.start()].rstrip()
            last = re.fullmatch(rf"({NEEDLE} ?)+", context[found.start() :])  # depth 100
            assert before == "" or before[-1] in ".!?" or last
    else:
        for line in context.split("\n"):
            assert line == NOISE or re.fullmatch(NEEDLE, line)
    assert 0 <= sample.depth <= 1

    # The budget.
    assert sample.tokens == [tokenizer.bos_id, *tokenizer.encode(sample.prompt)]
    assert len(sample.tokens) + ANSWER <= length


@pytest.mark.parametrize("name", RULER_TASKS)
def test_samples_are_what_the_specification_says(name, tokenizer, essays):
    for sample in made(tokenizer, essays, name, 6):
        check_sample(name, sample, tokenizer, essays)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULER_TASKS)
def test_500_samples_are_what_the_specification_says(name, tokenizer, essays):
    samples = made(tokenizer, essays, name, 500)
    for sample in samples:
        check_sample(name, sample, tokenizer, essays)
    assert len({s.references[0] for s in samples}) == 500
    depths = Counter(int(10 * s.depth) for s in samples)
    assert len(depths) >= 5  # of a few sentences, or a mean over needles
    assert samples[:50] == made(tokenizer, essays, name, 50)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_one_more_word_or_line_would_not_fit(name, tokenizer, essays):
    for place in range(3):
        draw = Draw(name, LENGTH, 5, place, essays)
        sample = draw.sample(tokenizer, LENGTH - ANSWER)
        units = next(n for n in range(1, 2000) if draw.prompt(n) == sample.prompt)
        assert len(draw.tokens(tokenizer, units + 1)) + ANSWER > LENGTH


@pytest.mark.parametrize("name", RULER_TASKS)
def test_samples_depend_on_seed_and_length_and_not_on_their_number(name, tokenizer, essays):
    many = made(tokenizer, essays, name, 4)
    assert made(tokenizer, essays, name, 2) == many[:2]
    assert made(tokenizer, essays, name, 2, seed=6) != many[:2]
    assert made(tokenizer, essays, name, 1, length=LENGTH + 50)[0].references != many[0].references


def test_needles_in_essays_stand_at_the_drawn_depths(tokenizer, essays):
    draw = Draw("multivalue", LENGTH, 1, 0, essays)
    assert draw.depths == sorted(set(draw.depths))
    assert set(draw.depths) <= set(DEPTHS)
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1]) == (0, 3, 100)
    context = essays.context(320, ["ONE.", "TWO.", "THREE."], [0, 50, 100])
    assert context.startswith("ONE. ")
    assert context.endswith(" THREE.")
    sentences = context.split(". ")
    assert sentences.index("TWO") == 21  # 40 sentences of 8 words, and ONE before it


def test_sentences_end_before_a_capital_or_a_quote():
    words = ["He", "paid", "3.5", "cents.", '"So?"', "she", "said.", "it", "was.", "Then"]
    assert [words[i] for i in sentence_ends(words)] == ['"So?"', "Then"]


def test_text_starts_again_where_it_ends():
    essays = Essays("One two. Three four.")
    assert essays.context(10, ["N."], [50]) == (
        "One two. Three four. N. One two. Three four. One two."
    )


def test_haystacks_are_read_from_text_and_json(tmp_path):
    (tmp_path / "a.txt").write_text("One  two.\n\nThree")
    (tmp_path / "a.json").write_text('{"text": "One two.", "more": ["Three"]}')
    assert Essays.load(tmp_path / "a.txt").text == Essays.load(tmp_path / "a.json").text
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="haystack is not JSON: got .*b.json"):
        Essays.load(tmp_path / "b.json")
    (tmp_path / "c.txt").write_text("  \n")
    with pytest.raises(ValueError, match="the haystack is empty"):
        Essays.load(tmp_path / "c.txt")


@pytest.mark.parametrize("limit", [3, 17, 18, 400])
@pytest.mark.parametrize("guess", [3, 18, 1000])
def test_the_largest_size_is_found_from_any_guess(limit, guess):
    assert largest(lambda n: n <= limit, max(3, guess), 3) == limit


def test_oracle_scores_100_and_silence_0(tokenizer, essays):
    for name in RULER_TASKS:
        sample = made(tokenizer, essays, name, 1)[0]
        assert grade(sample, f" {', '.join(sample.references)}.\n", name)["accuracy"] == 100
        assert grade(sample, "", name)["accuracy"] == 0
        part = grade(sample, sample.references[0], name)
        assert part["accuracy"] == 100 / len(sample.references)
        assert part["values_emitted"] == 1


def test_matching_ignores_case_and_what_stands_around():
    assert contains("the Number is\x0012345678, so", "2345678")
    assert contains("ABC", "abc")
    assert not contains("1234 567", "1234567")


def test_model_that_knows_the_value_gains_from_the_text(tokenizer, essays, subject, stand_in):
    """An oracle for the teacher-forced scores: after the prompt, all mass on the true value."""
    for name in ("single_1", "multiquery"):
        sample = made(tokenizer, essays, name, 1)[0]
        answer = tokenizer.encode(f" {sample.references[0]}")

        def logits(tokens, sample=sample, answer=answer):
            out = torch.zeros(*tokens.shape, tokenizer.vocab_size)
            for row in range(len(tokens)):
                for i, token in enumerate(answer):
                    if len(sample.tokens) - 1 + i < tokens.shape[1]:
                        out[row, len(sample.tokens) - 1 + i, token] = 50.0
            return out

        model = subject(stand_in(logits), max_seq_len=LENGTH)
        got = teacher_forced(model, tokenizer, sample)
        assert got["value_log_prob"] == pytest.approx(0, abs=1e-6)
        assert got["value_argmax_rate"] == got["value_first_rate"] == 100
        assert got["value_rank"] == 1
        assert got["absent_argmax_rate"] == 0
        assert got["retrieval_gain"] == got["value_log_prob"] - got["absent_log_prob"] > 5


def test_a_value_among_equals_is_last(tokenizer, essays, subject, uniform):
    sample = made(tokenizer, essays, "single_1", 1)[0]
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=LENGTH)
    got = teacher_forced(model, tokenizer, replace(sample, candidates=["1111111", "2222222"]))
    assert got["value_rank"] == 3
    assert got["value_first_rate"] == 0


def test_tasks_are_those_that_the_haystack_allows(essay_file):
    assert task_names(Options()) == ("single_1",)
    assert task_names(Options(haystack=essay_file)) == tuple(RULER_TASKS)
    assert task_names(Options(niah_tasks=("multikey_2",))) == ("multikey_2",)
    with pytest.raises(ValueError, match="unknown NIAH task: got multikey_9"):
        task_names(Options(niah_tasks=("single_1", "multikey_9")))
    with pytest.raises(ValueError, match="single_2 has no haystack: .*add --haystack FILE"):
        task_names(Options(niah_tasks=("single_2",)))


def test_length_beyond_the_model_or_below_the_shortest_prompt_is_refused(
    subject, uniform, tokenizer
):
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=LENGTH)
    with pytest.raises(ValueError, match=f"got {LENGTH + 1} tokens"):
        check(model, Options(lengths=(600, LENGTH + 1)))
    with pytest.raises(ValueError, match="too short: got 100 tokens for single_1; expected at le"):
        check(model, Options(lengths=(100,)))
    with pytest.raises(ValueError, match="few words"):
        Draw("multikey_2", 10, 0, 0, None).line_needles(len(ADJECTIVES) * len(NOUNS))


def test_shortest_length_that_is_named_holds_every_sample(subject, uniform, tokenizer):
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=LENGTH)
    size = {"answer_tokens": ANSWER, "samples": 50}
    length = 100
    # Another length draws other keys, so the named one may be a few tokens short for its own.
    for _ in range(5):
        try:
            check(model, Options(lengths=(length,), **size))
        except ValueError as error:
            named = re.search(r"expected at least (\d+)", str(error))
            length = int(named.group(1))
    check(model, Options(lengths=(length,), **size))
    samples = make_samples(tokenizer, "single_1", length=length, seed=0, **size)
    assert all(len(sample.tokens) + ANSWER <= length for sample in samples)
    assert max(sample.prompt.count(NOISE) for sample in samples) == 1


def test_value_after_a_prompt_that_fills_the_model_is_refused(subject, uniform, tokenizer):
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=LENGTH)
    draws = [Draw("single_1", LENGTH, 0, i, None) for i in range(20)]
    values = [v for d in draws for v in (d.values[0][0], d.absent, *d.others)]
    longest = max(len(tokenizer.encode(f" {value}")) for value in values)
    check(model, Options(lengths=(LENGTH,), samples=20, answer_tokens=longest - 1))
    words = f"no room after its prompt: got {longest - 2} tokens .* at least {longest - 1}, "
    with pytest.raises(ValueError, match=words):
        check(model, Options(lengths=(LENGTH,), samples=20, answer_tokens=longest - 2))


def test_settings_say_what_was_measured(subject, uniform, tokenizer, essay_file):
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=LENGTH)
    common = {"lengths": (600,), "answer_tokens": 4, "haystack": essay_file}
    few, more, other = (
        niah(model, Options(niah_tasks=("single_2",), samples=n, seed=seed, **common))
        for n, seed in ((2, 0), (3, 0), (2, 1))
    )
    settings = [results[0].settings for results in (few, more, other)]
    assert [s["samples"] for s in settings] == [2, 3, 2]
    assert len({s["samples_sha256"] for s in settings}) == 3
    assert few[0].settings["ruler_task"] == "niah_single_2"
    assert few[0].settings["haystack_sha256"] == Essays.load(essay_file).sha256[:16]
    assert {r.metric for r in few} >= {"accuracy", "retrieval_gain", "value_rank"}
