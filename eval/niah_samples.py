"""The samples of RULER's eight needle-in-a-haystack tasks (arXiv 2404.06654).

    name          haystack   key    value    keys  values  queries
    single_1      noise      word   number      1       1        1
    single_2      essays     word   number      1       1        1
    single_3      essays     word   uuid        1       1        1
    multikey_1    essays     word   number      4       1        1
    multikey_2    needles    word   number      1       1        1
    multikey_3    needles    uuid   uuid        1       1        1
    multivalue    essays     word   number      1       4        1
    multiquery    essays     word   number      4       1        4

A needle is the sentence "One of the special magic numbers for quiet-harbor is: 4829171." Words are
adjective-noun of eval/words.py, numbers 1,000,000 .. 9,999,999, uuids version 4. Haystacks: `noise`
repeats one line; `needles` are lines of other keys' needles; `essays` are the first words of a
text, which starts again where it ends. In essays the needles stand between sentences, at different
ones of 40 evenly spaced depths 0 .. 100 %; in lines at different random lines. Prompt:

    Some special magic numbers are hidden within the following text. Make sure to memorize it. I
    will quiz you about the numbers afterwards.
    <context>
    What are all the special magic numbers for a, b, c, and d mentioned in the provided text? The
    special magic numbers for a, b, c, and d mentioned in the provided text are

and in the singular for one query of one value. The start of the answer is always sent: RULER's own
runner drops it since 2025 (NVIDIA/RULER#107), and base models collapse without it.

Length: BOS + prompt + answer tokens <= the length asked for, in the model's own tokens, and one
more word or line would not fit. Sample i depends on the seed, the task, the length, the haystack
and the tokenizer only, not on how many samples are drawn.

Differences from RULER: keys come from our own words; no two keys and no two values of a sample are
the same, and none stands in the essays, so that the answer is unique; the permutation of the
needles is the sample's own instead of the same for all.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from data_prep.tokenizer import Tokenizer
from eval.niah_haystack import NOISE, Essays
from eval.words import ADJECTIVES, NOUNS

DEPTHS = tuple(round(100 * i / 39) for i in range(40))
CANDIDATES = 16  # values that the true one is ranked among, itself included


@dataclass(frozen=True, slots=True)
class RulerTask:
    """One line of the table in the module's text."""

    haystack: Literal["noise", "essays", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        return self.keys * self.values


RULER_TASKS = {
    "single_1": RulerTask("noise"),
    "single_2": RulerTask("essays"),
    "single_3": RulerTask("essays", value="uuids"),
    "multikey_1": RulerTask("essays", keys=4),
    "multikey_2": RulerTask("needles"),
    "multikey_3": RulerTask("needles", key="uuids", value="uuids"),
    "multivalue": RulerTask("essays", values=4),
    "multiquery": RulerTask("essays", keys=4, queries=4),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and what is to be found in it."""

    context: str
    question: str
    """From "What is" to the end of the prompt, the start of the answer included."""
    answer_start: str
    prompt: str
    tokens: list[int]
    """BOS and the prompt."""
    references: list[str]
    """What an answer has to contain; the first is the value of the companion scores."""
    absent: str
    """A value that the text does not hold."""
    candidates: list[str]
    """Other values, which the true one is ranked among."""
    depth: float
    """0 top .. 1 bottom: characters before the queried needles, mean."""


class Draw:
    """The random part of a sample; lines of other needles are drawn as they are needed."""

    def __init__(
        self, name: str, length: int, seed: int, place: int, essays: Essays | None
    ) -> None:
        self.task = task = RULER_TASKS[name]
        self._essays = essays
        self._stream = f"niah {name} {seed} {length} {place}"
        rng = random.Random(self._stream)
        self._used: set[str] = set()
        self.keys = [self._new(rng, task.key) for _ in range(task.keys)]
        self.values = [
            [self._new(rng, task.value) for _ in range(task.values)] for _ in range(task.keys)
        ]
        self.queried = rng.sample(range(task.keys), task.queries)
        self.absent = self._new(rng, task.value)
        self.others = [self._new(rng, task.value) for _ in range(CANDIDATES - 1)]
        self.order = rng.sample(range(task.needles), task.needles)
        self.depths = sorted(rng.sample(DEPTHS, task.needles))
        self._lines_rng = random.Random(f"{self._stream} lines")
        self._lines: list[tuple[str, str]] = []

    def _new(self, rng: random.Random, kind: str) -> str:
        """A word, number or uuid that this sample has not used."""
        if len(self._used) > len(ADJECTIVES) * len(NOUNS) // 2 and kind == "words":
            raise ValueError(
                f"too few words for so many needles: got {len(self._used)} used; expected at most "
                f"{len(ADJECTIVES) * len(NOUNS) // 2}; use a smaller --lengths or task multikey_3"
            )
        while True:
            if kind == "words":
                new = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
            elif kind == "numbers":
                new = str(rng.randint(1_000_000, 9_999_999))
            else:
                new = str(uuid.UUID(int=rng.getrandbits(128), version=4))
            if new not in self._used and (self._essays is None or new not in self._essays.text):
                self._used.add(new)
                return new

    def line_needles(self, count: int) -> list[tuple[str, str]]:
        """(key, value) of the first `count` lines of a haystack of needles."""
        while len(self._lines) < count:
            rng, task = self._lines_rng, self.task
            self._lines.append((self._new(rng, task.key), self._new(rng, task.value)))
        return self._lines[:count]

    def needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.task.value} for {key} is: {value}."

    def context(self, units: int) -> str:
        """The haystack of so many words or lines, with the needles."""
        pairs = [(k, v) for k, values in zip(self.keys, self.values, strict=True) for v in values]
        needles = [self.needle(*pairs[i]) for i in self.order]
        if self.task.haystack == "essays":
            assert self._essays is not None
            return self._essays.context(units, needles, self.depths)
        if self.task.haystack == "noise":
            lines = [NOISE] * units
        else:
            lines = [self.needle(*pair) for pair in self.line_needles(units)]
        places = random.Random(f"{self._stream} places").sample(range(units), len(needles))
        for place, needle in zip(sorted(places, reverse=True), needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    @property
    def smallest(self) -> int:
        """Words or lines that hold the needles."""
        return 1 if self.task.haystack == "essays" else self.task.needles

    def question(self) -> tuple[str, str]:
        """(question, start of the answer)."""
        task, one = self.task, self.task.queries * self.task.values == 1
        what = task.value[:-1] if one else task.value
        names = [self.keys[i] for i in self.queried]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        verb, asked = ("is", "is") if one else ("are", "are all")
        return (
            f"What {asked} the special magic {what} for {query} mentioned in the provided text?",
            f"The special magic {what} for {query} mentioned in the provided text {verb}",
        )

    def prompt(self, units: int) -> str:
        one = self.task.queries * self.task.values == 1
        what = self.task.value[:-1] if one else self.task.value
        some, verb = ("A", "is") if one else ("Some", "are")
        preface = (
            f"{some} special magic {what} {verb} hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {what} afterwards."
        )
        return f"{preface}\n{self.context(units)}\n{' '.join(self.question())}"

    def tokens(self, tokenizer: Tokenizer, units: int) -> list[int]:
        return [tokenizer.bos_id, *tokenizer.encode(self.prompt(units))]

    def sample(self, tokenizer: Tokenizer, budget: int) -> Sample:
        """The largest prompt of at most `budget` tokens, BOS included. The smallest must fit."""
        sizes = cache(lambda units: len(self.tokens(tokenizer, units)))
        guess = max(self.smallest, budget // self._unit_tokens(tokenizer))
        guess = max(self.smallest, guess + (budget - sizes(guess)) * guess // sizes(guess))
        units = largest(lambda units: sizes(units) <= budget, guess, self.smallest)
        return self._made(tokenizer, units)

    def _unit_tokens(self, tokenizer: Tokenizer) -> int:
        """About how many tokens one more word or line takes."""
        if self.task.haystack == "essays":
            return 1
        line = NOISE
        if self.task.haystack == "needles":
            line = self.needle(self.keys[0], self.values[0][0])
        return max(1, len(tokenizer.encode(line + "\n")))

    def _made(self, tokenizer: Tokenizer, units: int) -> Sample:
        task, context, prompt = self.task, self.context(units), self.prompt(units)
        asked = [(self.keys[i], value) for i in self.queried for value in self.values[i]]
        at = [context.index(self.needle(*pair)) for pair in asked]
        references = [value for _, value in asked]
        if task.haystack == "needles":
            others = [value for _, value in self.line_needles(units)][: CANDIDATES - 1]
        elif task.keys > 1:
            others = [v for values in self.values for v in values if v != references[0]]
        else:
            others = self.others if task.values == 1 else self.others[: task.values - 1]
        question, answer_start = self.question()
        return Sample(
            context=context,
            question=question,
            answer_start=answer_start,
            prompt=prompt,
            tokens=self.tokens(tokenizer, units),
            references=references,
            absent=self.absent,
            candidates=others,
            depth=sum(at) / len(at) / len(context),
        )


def largest(fits: Callable[[int], bool], guess: int, smallest: int) -> int:
    """The largest n >= smallest with fits(n), which holds up to some n and not beyond; smallest is
    taken to fit."""
    step, low = 1, guess
    while low > smallest and not fits(low):
        low, step = max(smallest, low - step), step * 2
    step, high = 1, low + 1
    while fits(high):
        low, high, step = high, high + step, step * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
