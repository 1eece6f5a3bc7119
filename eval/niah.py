"""S-NIAH-1, the pass-key task: RULER's niah_single_1 (arXiv 2404.06654).

Noise haystack, word key, number value.

One sentence with a seven-digit number, the needle, stands at a random line of a haystack of one
repeated line. The prompt ends with the question and the start of the answer; the model continues
greedily.

    A special magic number is hidden within the following text. Make sure to memorize it. I will
    quiz you about the number afterwards.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    One of the special magic numbers for quiet-harbor is: 4829171.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    What is the special magic number for quiet-harbor mentioned in the provided text? The special
    magic number for quiet-harbor mentioned in the provided text is             -> " 4829171."

Length: BOS + prompt + answer_tokens <= the length asked for, in the model's own tokens, and one
more line would not fit. RULER generates 128 tokens; another `answer_tokens` makes room in short
contexts and is in `settings`.

Metrics, each per length:
    accuracy              percent of samples whose continuation contains the number (RULER's
                          string_match_all); also per quarter of depth, accuracy_depth_0_25 ...
                          (0 = needle before the first line)
    numbers_emitted       distinct seven-digit strings in a continuation, mean: a model that lists
                          many can score
    value_log_prob        nats a token of the true value, teacher-forced after the prompt, mean
    value_argmax_rate     percent of samples in which every token of the value is the argmax
    absent_log_prob, absent_argmax_rate      the same for a number that is not in the text
    retrieval_gain        value_log_prob - absent_log_prob: > 0 says that the text was used, though
                          the model may be too weak to answer

Differences from RULER: keys come from our own word lists, and the answer prefix is always sent
(RULER's own runner drops it since 2025, NVIDIA/RULER#107, and base models collapse without it).
Samples depend only on the seed, the length and the tokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.tokenizer import Tokenizer
from eval.completion import complete
from eval.progress import track
from eval.result import Options, Result, Subject, mean_result
from eval.scoring import Score, Window, score, window_batches
from eval.words import ADJECTIVES, NOUNS

VERSION = 1

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PREFACE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)
DEPTH_QUARTERS = ((0, 25), (25, 50), (50, 75), (75, 100))


@dataclass(frozen=True, slots=True)
class Needle:
    """What a prompt hides under which key, a value that it does not hide, and where among the
    lines the needle stands (0 top .. 1 bottom)."""

    key: str
    value: str
    absent: str
    where: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt: its ids with BOS, the number it hides, one that it does not, and where (0 top
    .. 1 bottom)."""

    prompt: str
    tokens: list[int]
    value: str
    absent: str
    depth: float


def prompt_text(key: str, value: str, lines: int, position: int) -> str:
    """The prompt with the needle before noise line `position` of `lines` (after the last if
    equal)."""
    haystack = [NOISE] * lines
    haystack.insert(position, f"One of the special magic numbers for {key} is: {value}.")
    question = f"What is the special magic number for {key} mentioned in the provided text?"
    answer = f"The special magic number for {key} mentioned in the provided text is"
    return "\n".join([PREFACE, *haystack, f"{question} {answer}"])


def draw_needles(*, length: int, samples: int, seed: int) -> list[Needle]:
    """The random part of the samples of one length."""
    # One stream per length: samples of one length do not depend on which others were asked for.
    rng = random.Random(f"S-NIAH-1 {seed} {length}")
    needles = []
    for _ in range(samples):
        key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        value, absent = (str(n) for n in rng.sample(range(1_000_000, 10_000_000), 2))
        needles.append(Needle(key, value, absent, rng.random()))
    return needles


def _prompt(needle: Needle, lines: int) -> str:
    return prompt_text(needle.key, needle.value, lines, round(needle.where * lines))


def _prompt_tokens(tokenizer: Tokenizer, needle: Needle, lines: int) -> list[int]:
    return [tokenizer.bos_id, *tokenizer.encode(_prompt(needle, lines))]


def _value_tokens(tokenizer: Tokenizer, value: str) -> list[int]:
    return tokenizer.encode(f" {value}")


def make_samples(
    tokenizer: Tokenizer, *, length: int, answer_tokens: int, samples: int, seed: int
) -> list[Sample]:
    """Samples that fill `length` tokens to within one noise line. `check` has refused a length in
    which a prompt of one line does not fit."""
    budget = length - answer_tokens
    lines = max(1, budget // max(1, len(tokenizer.encode(NOISE + "\n"))))
    out = []
    for needle in draw_needles(length=length, samples=samples, seed=seed):
        while len(_prompt_tokens(tokenizer, needle, lines + 1)) <= budget:
            lines += 1
        while lines > 1 and len(_prompt_tokens(tokenizer, needle, lines)) > budget:
            lines -= 1
        out.append(
            Sample(
                prompt=_prompt(needle, lines),
                tokens=_prompt_tokens(tokenizer, needle, lines),
                value=needle.value,
                absent=needle.absent,
                depth=round(needle.where * lines) / lines,
            )
        )
    return out


def contains(answer: str, value: str) -> bool:
    """RULER's string_match_all for one reference; control characters count as line ends, case
    does not matter."""
    return value.lower() in re.sub(r"[\x00-\x1f]", "\n", answer).strip().lower()


def check(subject: Subject, options: Options) -> None:
    """Refuse a model without tokenizer, and lengths that the model cannot read or that cannot hold
    every prompt with one noise line."""
    tokenizer = subject.need_tokenizer("niah")
    for length in _lengths(subject, options):
        subject.check_length("NIAH length", length)
        budget = length - options.answer_tokens
        needles = draw_needles(length=length, samples=options.samples, seed=options.seed)
        shortest = max(len(_prompt_tokens(tokenizer, needle, 1)) for needle in needles)
        if shortest > budget:
            raise ValueError(
                f"NIAH length is too short: got {length} tokens; expected at least "
                f"{shortest + options.answer_tokens} (prompt with one line, and "
                f"{options.answer_tokens} to answer); use a larger --lengths or a smaller "
                "--answer-tokens"
            )
        # The teacher-forced value stands after the prompt too, and may be longer than an answer.
        values = (value for needle in needles for value in (needle.value, needle.absent))
        longest = max(len(_value_tokens(tokenizer, value)) for value in values)
        subject.check_length("NIAH prompt with its value", budget + longest - 1)


def _lengths(subject: Subject, options: Options) -> tuple[int, ...]:
    return options.lengths or (subject.max_seq_len,)


def niah(subject: Subject, options: Options) -> list[Result]:
    """All metrics of the module's text for every length of `options.lengths`."""
    tokenizer = subject.need_tokenizer("niah")
    results = []
    for length in _lengths(subject, options):
        samples = make_samples(
            tokenizer,
            length=length,
            answer_tokens=options.answer_tokens,
            samples=options.samples,
            seed=options.seed,
        )
        completions = complete(
            subject.model,
            [sample.tokens for sample in samples],
            max_new_tokens=options.answer_tokens,
            stop_ids=(tokenizer.eos_id,),
            batch_tokens=options.batch_tokens,
        )
        answers = [
            tokenizer.decode(ids)
            for ids in track(completions, len(samples), f"niah {length}: answers")
        ]
        results += grade(samples, answers, length, options)
        results += teacher_forced(subject, tokenizer, samples, length, options)
    return results


def grade(
    samples: Sequence[Sample], answers: Sequence[str], length: int, options: Options
) -> list[Result]:
    """accuracy, accuracy by depth, numbers_emitted; one answer per sample."""
    hits = np.array([contains(a, s.value) for s, a in zip(samples, answers, strict=True)], float)
    depths = np.array([s.depth for s in samples])
    numbers = np.array([len(set(re.findall(r"(?<!\d)\d{7}(?!\d)", a))) for a in answers], float)
    results = [_result("accuracy", 100 * hits, "percent", length, options)]
    for low, high in DEPTH_QUARTERS:
        here = (depths * 100 >= low) & ((depths * 100 < high) | (high == 100))
        if here.any():
            name = f"accuracy_depth_{low}_{high}"
            results.append(_result(name, 100 * hits[here], "percent", length, options))
    return [*results, _result("numbers_emitted", numbers, "per answer", length, options)]


def teacher_forced(
    subject: Subject,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    length: int,
    options: Options,
) -> list[Result]:
    """Log-probability and argmax rate of the true and of an absent value, straight after the
    prompt."""
    windows = []
    for sample in samples:
        for number in (sample.value, sample.absent):
            target = _value_tokens(tokenizer, number)
            windows.append(Window([*sample.tokens, *target[:-1]], target))
    batches = window_batches(windows, options.batch_tokens)
    scores: list[Score] = list(
        track(
            score(subject.model, batches, subject.device),
            len(windows),
            f"niah {length}: log-probabilities",
        )
    )
    log_prob = np.array([-s.nll / s.tokens for s in scores]).reshape(-1, 2)
    exact = np.array([100.0 * (s.hits == s.tokens) for s in scores]).reshape(-1, 2)
    columns = (
        ("value_log_prob", log_prob[:, 0], "nats per token"),
        ("value_argmax_rate", exact[:, 0], "percent"),
        ("absent_log_prob", log_prob[:, 1], "nats per token"),
        ("absent_argmax_rate", exact[:, 1], "percent"),
        ("retrieval_gain", log_prob[:, 0] - log_prob[:, 1], "nats per token"),
    )
    return [_result(name, values, unit, length, options) for name, values, unit in columns]


def _result(metric: str, values: np.ndarray, unit: str, length: int, options: Options) -> Result:
    settings = {
        "length": length,
        "answer_tokens": options.answer_tokens,
        "samples": options.samples,
        "seed": options.seed,
    }
    return mean_result("niah", VERSION, metric, values, unit, settings)
