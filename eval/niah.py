"""Needle in a haystack: RULER's eight tasks; samples, prompts and their rules in niah_samples.py.

Without --haystack the pass-key task alone (single_1) is run, which needs no text; with one, all
eight, or those of --niah-tasks. The model continues each prompt greedily. Metrics, each per task
and length:

    accuracy              percent of the references that stand in the continuation, mean over
                          samples (RULER's string_match_all); also per quarter of depth,
                          accuracy_depth_0_25 ... (0 = needle at the top)
    values_emitted        distinct numbers or uuids in a continuation, mean: a model that lists many
                          can score
    value_log_prob        nats a token of the (first) true value, teacher-forced after the prompt
    value_argmax_rate     percent of samples in which every token of the value is the argmax
    absent_log_prob, absent_argmax_rate      the same for a value that is not in the text
    retrieval_gain        value_log_prob - absent_log_prob: > 0 says that the text was used, though
                          the model may be too weak to answer
    value_rank            place of the true value by log-probability among `candidates` values, 1 is
                          first, mean: the other values of the text where it has several (multikey,
                          multiquery), else values that it does not hold
    value_first_rate      percent of samples in which it is first; chance is 100 / candidates

Longer than the model's rows in training: refused without --beyond-trained, then marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np

from data_prep.tokenizer import Tokenizer
from eval.completion import complete, score_continuations
from eval.niah_haystack import Essays
from eval.niah_samples import CANDIDATES, RULER_TASKS, Draw, Sample
from eval.result import Options, Result, Subject, mean_result
from eval.samples import Values

VERSION = 2
PAIRED = ("accuracy", "value_log_prob", "retrieval_gain")
DEPTH_QUARTERS = ((0, 25), (25, 50), (50, 75), (75, 100))
UNITS = {
    "accuracy": "percent",
    "values_emitted": "per answer",
    "value_log_prob": "nats per token",
    "value_argmax_rate": "percent",
    "absent_log_prob": "nats per token",
    "absent_argmax_rate": "percent",
    "retrieval_gain": "nats per token",
    "value_rank": "place",
    "value_first_rate": "percent",
}
_VALUES = {
    "numbers": re.compile(r"(?<!\d)\d{7}(?!\d)"),
    "uuids": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
}


def task_names(options: Options) -> tuple[str, ...]:
    """The RULER tasks asked for; ValueError for an unknown one or one that lacks its text."""
    names = options.niah_tasks
    if not names:
        names = ("single_1",) if options.haystack is None else tuple(RULER_TASKS)
    if unknown := [name for name in names if name not in RULER_TASKS]:
        raise ValueError(
            f"unknown NIAH task: got {','.join(unknown)}; expected some of "
            f"{','.join(RULER_TASKS)}; correct --niah-tasks"
        )
    essays = [name for name in names if RULER_TASKS[name].haystack == "essays"]
    if essays and options.haystack is None:
        raise ValueError(
            f"NIAH task {essays[0]} has no haystack: got no --haystack; expected a text, plain or "
            ".xz, or RULER's JSON; add --haystack FILE"
        )
    return names


def check(subject: Subject, options: Options) -> None:
    """Refuse a model without tokenizer, unknown tasks, a haystack that cannot be read, and lengths
    that the model cannot read or that cannot hold every prompt with the smallest haystack."""
    tokenizer = subject.need_tokenizer("niah")
    names = task_names(options)
    essays = None if options.haystack is None else Essays.load(options.haystack)
    for length in _lengths(subject, options):
        subject.check_length("NIAH length", length)
        budget = length - options.answer_tokens
        for name in names:
            _check_budget(name, tokenizer, _draws(name, length, essays, options), budget, options)
        # The teacher-forced value stands after the prompt too, and may be longer than an answer.
        draws = [draw for name in names for draw in _draws(name, length, essays, options)]
        values = (v for d in draws for v in (d.values[0][0], d.absent, *d.others))
        longest = max(len(_value_tokens(tokenizer, value)) for value in values)
        room = subject.max_seq_len if subject.beyond_trained else subject.usual_length
        if budget + longest - 1 > room:
            raise ValueError(
                f"NIAH value has no room after its prompt: got {options.answer_tokens} tokens to "
                f"answer at length {length}; expected at least {length + longest - 1 - room}, as a "
                f"value takes {longest}; use a larger --answer-tokens or a smaller --lengths"
            )


def _check_budget(
    name: str, tokenizer: Tokenizer, draws: Sequence[Draw], budget: int, options: Options
) -> None:
    shortest = max(len(draw.tokens(tokenizer, draw.smallest)) for draw in draws)
    if shortest > budget:
        raise ValueError(
            f"NIAH length is too short: got {budget + options.answer_tokens} tokens for {name}; "
            f"expected at least {shortest + options.answer_tokens} (the shortest prompt, and "
            f"{options.answer_tokens} to answer); use a larger --lengths or a smaller "
            "--answer-tokens"
        )


def _lengths(subject: Subject, options: Options) -> tuple[int, ...]:
    return options.lengths or (subject.usual_length,)


def _draws(name: str, length: int, essays: Essays | None, options: Options) -> list[Draw]:
    return [Draw(name, length, options.seed, i, essays) for i in range(options.samples)]


def make_samples(
    tokenizer: Tokenizer,
    name: str,
    *,
    length: int,
    answer_tokens: int,
    samples: int,
    seed: int,
    essays: Essays | None = None,
) -> list[Sample]:
    """Samples that fill `length` tokens to within one word or line."""
    return [
        Draw(name, length, seed, place, essays).sample(tokenizer, length - answer_tokens)
        for place in range(samples)
    ]


def niah(subject: Subject, options: Options) -> list[Result]:
    """All metrics of the module's text for every task and length."""
    essays = None if options.haystack is None else Essays.load(options.haystack)
    results = []
    for length in _lengths(subject, options):
        for name in task_names(options):
            results += _one(subject, options, essays, name, length)
    return results


def _one(
    subject: Subject, options: Options, essays: Essays | None, name: str, length: int
) -> list[Result]:
    tokenizer = subject.need_tokenizer("niah")
    uses_essays = RULER_TASKS[name].haystack == "essays"
    settings = {
        "ruler_task": f"niah_{name}",
        "length": length,
        "answer_tokens": options.answer_tokens,
        "seed": options.seed,
        "haystack_sha256": essays.sha256[:16] if essays is not None and uses_essays else None,
        "tokenizer_sha256": tokenizer.sha256[:16],
        **subject.length_mark(length),
    }
    draws = _draws(name, length, essays if uses_essays else None, options)

    def run(places: list[int]) -> Iterator[Values]:
        # A few at a time, so that a stopped evaluation has lost little.
        group = max(1, options.batch_tokens // length)
        for start in range(0, len(places), group):
            some = [
                draws[i].sample(tokenizer, length - options.answer_tokens)
                for i in places[start : start + group]
            ]
            answers = complete(
                subject.model,
                [sample.tokens for sample in some],
                max_new_tokens=options.answer_tokens,
                stop_ids=(tokenizer.eos_id,),
                batch_tokens=options.batch_tokens,
            )
            for sample, ids in zip(some, answers, strict=True):
                answer = tokenizer.decode(ids)
                yield {
                    **grade(sample, answer, name),
                    **teacher_forced(subject, tokenizer, sample),
                    "answer": answer,
                }

    log = subject.samples.open("niah", VERSION, settings)
    keys = [str(place) for place in range(options.samples)]
    values = log.scored(keys, run, f"niah_{name} {length}")
    log.close()
    digest = sha256()
    for draw in draws:
        digest.update(repr((draw.keys, draw.values, draw.queried, draw.depths)).encode())
    needles = RULER_TASKS[name].needles
    settings |= {
        "candidates": needles if needles > 1 else CANDIDATES,
        "samples": options.samples,
        "samples_sha256": digest.hexdigest()[:16],
    }
    return _results(values, settings)


def contains(answer: str, value: str) -> bool:
    """RULER's string_match_all for one reference; control characters count as line ends, case
    does not matter."""
    return value.lower() in re.sub(r"[\x00-\x1f]", "\n", answer).strip().lower()


def grade(sample: Sample, answer: str, name: str) -> Values:
    """accuracy, values_emitted and depth of one answer."""
    hits = sum(contains(answer, value) for value in sample.references)
    emitted = set(_VALUES[RULER_TASKS[name].value].findall(answer.lower()))
    return {
        "accuracy": 100 * hits / len(sample.references),
        "values_emitted": len(emitted),
        "depth": sample.depth,
    }


def teacher_forced(subject: Subject, tokenizer: Tokenizer, sample: Sample) -> Values:
    """The companion scores of one sample."""
    texts = [sample.references[0], sample.absent, *sample.candidates]
    ids = [_value_tokens(tokenizer, text) for text in texts]
    # `check` has seen to the first two; a line's value may be longer than any that it has seen.
    room = subject.max_seq_len - len(sample.tokens) + 1
    ids = [*ids[:2], *(candidate for candidate in ids[2:] if len(candidate) <= room)]
    scores = score_continuations(subject.model, sample.tokens, ids, subject.device)
    true, absent, *others = (-score.nll / score.tokens for score in scores)
    exact = [100.0 * (score.hits == score.tokens) for score in scores]
    rank = 1 + sum(other >= true for other in others)
    return {
        "value_log_prob": true,
        "value_argmax_rate": exact[0],
        "absent_log_prob": absent,
        "absent_argmax_rate": exact[1],
        "retrieval_gain": true - absent,
        "value_rank": rank,
        "value_first_rate": 100.0 * (rank == 1),
    }


def _value_tokens(tokenizer: Tokenizer, value: str) -> list[int]:
    return tokenizer.encode(f" {value}")


def _results(values: Sequence[Values], settings: dict) -> list[Result]:
    depths = 100 * np.array([one["depth"] for one in values])
    results = []
    for metric, unit in UNITS.items():
        column = np.array([one[metric] for one in values], dtype=np.float64)
        results.append(mean_result("niah", VERSION, metric, column, unit, settings))
        if metric != "accuracy":
            continue
        for low, high in DEPTH_QUARTERS:
            here = (depths >= low) & ((depths < high) | (high == 100))
            if here.any():
                name = f"accuracy_depth_{low}_{high}"
                results.append(mean_result("niah", VERSION, name, column[here], unit, settings))
    return results
