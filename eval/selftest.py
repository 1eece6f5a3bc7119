"""Are the tasks right? Models whose scores are known go through every one of them.

    oracle     knows the answer: perplexity 1, accuracy 100
    random     accuracy not above chance
    uniform    ln(vocabulary) nats a token, everywhere
    n-gram     the perplexity that its counts give, computed here without the tasks' code

The text is drawn from word lists, so nothing is read or fetched. With WikiText's own files
(--wikitext-train wiki.train.tokens --wikitext wiki.test.tokens) the unigram model of the training
words is scored on them, too: 911.7 on the test and 965.1 on the validation part of WikiText-2.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from data_prep.mqar import MQAR_VARIANTS, MqarTask
from data_prep.selective_copy import COPY_VARIANTS, SelectiveCopyTask
from eval import niah, wikitext
from eval.niah_samples import RULER_TASKS
from eval.progress import track
from eval.result import Options, Result, Subject
from eval.scoring import Model
from eval.selftest_material import WINDOW, Material
from eval.selftest_models import (
    BigramModel,
    CopyOracle,
    MqarOracle,
    RandomModel,
    TextOracle,
    UniformModel,
    UnigramModel,
    WordTokenizer,
)
from eval.task import find_task
from eval.text_files import read_text

NIAH_LENGTH, NIAH_ANSWER, NIAH_SAMPLES = 900, 48, 3
ROWS = 50
CLOSED_WINDOW = 128  # tokens a pass: logits of 33,278 words stay within the allocator's reach
TOLERANCE = 1e-4  # relative: fp32 logits, summed in fp64


@dataclass(frozen=True)
class Line:
    """One check."""

    task: str
    model: str
    metric: str
    found: float
    expected: float
    at_most: bool = False
    """Whether a smaller value holds, too."""

    @property
    def holds(self) -> bool:
        slack = TOLERANCE * max(1.0, abs(self.expected))
        if self.at_most:
            return self.found <= self.expected + slack
        return abs(self.found - self.expected) <= slack

    def describe(self) -> str:
        """In words, for a message."""
        rule = "at most " if self.at_most else ""
        return (
            f"{self.task}, {self.model} model, {self.metric}: got {self.found:.5g}; "
            f"expected {rule}{self.expected:.5g}"
        )


def run(wikitext_train: Path | None = None, wikitext_files: Sequence[Path] = ()) -> list[Line]:
    """Every check; those of WikiText's own files where they are given.

    Raises:
        ValueError, OSError: a file is missing or unreadable, or only one kind of them was given.
    """
    if (wikitext_train is None) != (not wikitext_files):
        raise ValueError(
            "WikiText's files belong together: got one of --wikitext-train and --wikitext; "
            "expected both or none"
        )
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        material = Material(Path(folder))
        parts = [
            ("perplexity", _perplexity),
            ("wikitext", _wikitext),
            ("loss-by-position", _positions),
            ("niah", _niah),
            ("mqar", _mqar),
            ("selective-copy", _copying),
        ]
        if importlib.util.find_spec("lm_eval") is not None:
            parts.append(("lm-eval", _harness))
        for _, part in track(iter(parts), len(parts), "selftest"):
            lines += part(material)
    if wikitext_train is not None:
        train = read_text(wikitext_train)
        for path in wikitext_files:
            lines += closed_vocabulary(train, path, path.name)
    return lines


def table(lines: Sequence[Line]) -> Table:
    """For a terminal."""
    out = Table(title="selftest", title_justify="left")
    for name in ("task", "model", "metric"):
        out.add_column(name)
    for name in ("found", "expected"):
        out.add_column(name, justify="right")
    out.add_column("")
    for line in lines:
        rule = "<= " if line.at_most else ""
        out.add_row(
            line.task,
            line.model,
            line.metric,
            f"{line.found:.5g}",
            f"{rule}{line.expected:.5g}",
            "ok" if line.holds else "WRONG",
        )
    return out


def _scores(task: str, subject: Subject, options: Options) -> list[Result]:
    """Through the task as the command line does it."""
    find_task(task).check(subject, options)
    return find_task(task).run(subject, options)


def _value(results: Sequence[Result], metric: str, **settings: object) -> float:
    (one,) = (
        r.value for r in results if r.metric == metric and settings.items() <= r.settings.items()
    )
    return one


def _language_models(
    material: Material, documents: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Model, float]]:
    """(name, model, its nats of all tokens after BOS) for documents with BOS."""
    size = material.tokenizer.vocab_size
    tokens = sum(len(document) - 1 for document in documents)
    bigram = BigramModel(documents, size)
    nats = -sum(
        math.log(bigram.probability(a, b))
        for document in documents
        for a, b in zip(document, document[1:], strict=False)
    )
    yield "oracle", TextOracle(documents, size), 0.0
    yield "uniform", UniformModel(size), tokens * math.log(size)
    yield "bigram", bigram, nats


def _with_bos(material: Material, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = material.tokenizer
    return [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]


def _perplexity(material: Material) -> Iterator[Line]:
    texts = [path.read_text(encoding="utf-8") for path in material.text_files]
    documents = _with_bos(material, texts)
    tokens = sum(len(document) - 1 for document in documents)
    size = sum(len(text.encode()) for text in texts)
    options = Options(texts=tuple(material.text_files), stride=32)
    for name, model, nats in _language_models(material, documents):
        results = _scores("perplexity", material.subject(model), options)
        value = _value(results, "perplexity")
        yield Line("perplexity", name, "perplexity", value, math.exp(nats / tokens))
        bits = _value(results, "bits_per_byte")
        yield Line("perplexity", name, "bits_per_byte", bits, nats / size / math.log(2))


def _wikitext(material: Material) -> Iterator[Line]:
    articles = re.split(r"(?<=\n)(?= = \w[\w ]* = \n)", material.raw)[1:]
    documents = _with_bos(material, [wikitext.detokenise(article) for article in articles])
    words = sum(len(re.split(r"\s+", article)) for article in articles)
    size = sum(len(article.encode()) for article in articles)
    for name, model, nats in _language_models(material, documents):
        subject = material.subject(model)
        results = _scores("wikitext", subject, Options(wikitext=material.raw_file))
        value = _value(results, "word_perplexity")
        yield Line("wikitext", name, "word_perplexity", value, math.exp(nats / words))
        value = _value(results, "byte_perplexity")
        yield Line("wikitext", name, "byte_perplexity", value, math.exp(nats / size))
    yield from closed_vocabulary(material.raw, material.tokens_file, "wikitext tokens")


def closed_vocabulary(train: str, path: Path, name: str) -> Iterator[Line]:
    """The unigram model of a training text's words and line ends, on another tokenised text."""
    tokenizer = WordTokenizer(train)
    counts = Counter(tokenizer.encode(train))
    log_probs = torch.full((tokenizer.vocab_size,), -math.inf, dtype=torch.float64)
    for token, count in counts.items():
        log_probs[token] = math.log(count / counts.total())
    subject = Subject(
        model=UnigramModel(log_probs.float()),
        vocab_size=tokenizer.vocab_size,
        max_seq_len=CLOSED_WINDOW,
        tokenizer=tokenizer,
        device="cpu",
    )
    results = _scores("wikitext", subject, Options(wikitext=path, batch_tokens=CLOSED_WINDOW))
    # Apart from the task: words by splitting the whole text, an end for each newline.
    text = read_text(path)
    seen = Counter(text.split())
    seen[WordTokenizer.EOS] += text.count("\n")
    frequency = Counter(train.split())
    frequency[WordTokenizer.EOS] += train.count("\n")
    total = frequency.total()
    nats = -sum(n * math.log(frequency[word] / total) for word, n in seen.items())
    value = _value(results, "word_perplexity_closed")
    expected = math.exp(nats / seen.total())
    yield Line(name, "unigram", "word_perplexity_closed", value, expected)


def _positions(material: Material) -> Iterator[Line]:
    texts = [path.read_text(encoding="utf-8") for path in material.text_files]
    documents = _with_bos(material, texts)
    blocks = [(len(document) - 1) // WINDOW for document in documents]
    used = [document[: n * WINDOW + 1] for document, n in zip(documents, blocks, strict=True)]
    for name, model, nats in _language_models(material, used):
        options = Options(texts=tuple(material.text_files))
        results = _scores("loss-by-position", material.subject(model), options)
        found = sum(r.value * r.count for r in results if r.metric == "nll")
        tokens = sum(blocks) * WINDOW
        yield Line("loss-by-position", name, "nll", found / tokens, nats / tokens)
        if name == "uniform":
            flat = max(abs(r.value - nats / tokens) for r in results)
            yield Line("loss-by-position", name, "largest deviation of a bucket", flat, 0.0)


def _niah(material: Material) -> Iterator[Line]:
    size = material.tokenizer.vocab_size
    for name in RULER_TASKS:
        options = _niah_options(material, name)
        oracle = material.subject(niah_oracle(material, name), NIAH_LENGTH)
        results = _scores("niah", oracle, options)
        task = f"niah_{name}"
        yield Line(task, "oracle", "accuracy", _value(results, "accuracy"), 100.0)
        if name != "multivalue":  # the oracle lists the values as they come in the text
            value = _value(results, "value_argmax_rate")
            yield Line(task, "oracle", "value_argmax_rate", value, 100.0)
        results = _scores("niah", material.subject(RandomModel(size), NIAH_LENGTH), options)
        yield Line(task, "random", "accuracy", _value(results, "accuracy"), 0.0, at_most=True)
        gain = abs(_value(results, "retrieval_gain"))
        yield Line(task, "random", "size of retrieval_gain", gain, 0.01, at_most=True)


def _niah_options(material: Material, name: str) -> Options:
    return Options(
        niah_tasks=(name,),
        haystack=material.essay_file,
        lengths=(NIAH_LENGTH,),
        answer_tokens=NIAH_ANSWER if RULER_TASKS[name].value == "numbers" else 2 * NIAH_ANSWER,
        samples=NIAH_SAMPLES,
    )


def niah_oracle(material: Material, name: str) -> TextOracle:
    """Knows the prompts, each followed by what a search of its text for the asked keys finds."""
    options = _niah_options(material, name)
    tokenizer = material.tokenizer
    texts = []
    for sample in niah.make_samples(
        tokenizer,
        name,
        length=NIAH_LENGTH,
        answer_tokens=options.answer_tokens,
        samples=NIAH_SAMPLES,
        seed=options.seed,
        essays=material.essays,
    ):
        found = search_answer(sample.prompt)
        continuation = [
            *tokenizer.encode(f" {found[0]}"),
            *(i for value in found[1:] for i in tokenizer.encode(f", {value}")),
            tokenizer.eos_id,
        ]
        texts.append([*sample.tokens, *continuation])
    return TextOracle(texts, tokenizer.vocab_size)


def search_answer(prompt: str) -> list[str]:
    """The values of the keys that a prompt asks for, by reading its text."""
    context, _, question = prompt.rpartition("\nWhat ")
    asked = re.search(r"special magic \w+ for (.+?) mentioned in the provided text\?", question)
    assert asked is not None
    keys = re.split(r", and |, ", asked[1])
    needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", context)
    return [value for key in keys for found, value in needles if found == key]


def _mqar(material: Material) -> Iterator[Line]:
    for variant in MQAR_VARIANTS:
        task = MqarTask(seq_len=64, pairs=8, vocab_size=128, variant=variant)
        options = Options(
            pairs=(task.pairs,),
            lengths=(task.seq_len,),
            variant=variant,
            task_vocab_size=task.vocab_size,
            samples=ROWS,
        )
        # A filler that repeats a key of the context is no question: the oracle answers it, and
        # nothing is scored there.
        yield from _rows("mqar", variant, material, MqarOracle(task), task.vocab_size, options)


def _copying(material: Material) -> Iterator[Line]:
    for variant in COPY_VARIANTS:
        size = 16 if variant == "s4" else 128
        task = SelectiveCopyTask(seq_len=64, copied=8, vocab_size=size, variant=variant)
        options = Options(
            pairs=(task.copied,), lengths=(task.seq_len,), variant=variant, samples=ROWS
        )
        yield from _rows("selective-copy", variant, material, CopyOracle(task), size, options)


def _rows(
    task: str, variant: str, material: Material, oracle: Model, vocab_size: int, options: Options
) -> Iterator[Line]:
    name = f"{task} {variant}"
    for model_name, model in (("oracle", oracle), ("random", RandomModel(vocab_size))):
        subject = replace(material.subject(model), vocab_size=vocab_size)
        results = _scores(task, subject, options)
        accuracy = next(r for r in results if r.metric == "accuracy")
        if model_name == "oracle":
            for metric in ("accuracy", "sequence_accuracy"):
                yield Line(name, model_name, metric, _value(results, metric), 100.0)
            continue
        chance = 100 / vocab_size
        spread = 4 * math.sqrt(chance * (100 - chance) / (ROWS * options.pairs[0]))
        yield Line(name, model_name, "accuracy", accuracy.value, chance + spread, at_most=True)


def _harness(material: Material) -> Iterator[Line]:
    size = material.tokenizer.vocab_size
    options = Options(wikitext=material.raw_file)
    ours = _scores("wikitext", material.subject(UniformModel(size)), options)
    theirs = _scores("lm-eval:wikitext", material.subject(UniformModel(size)), options)
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        yield Line(
            "lm-eval wikitext", "uniform", metric, _value(theirs, metric), _value(ours, metric)
        )
    for name in ("single_1", "multiquery"):
        oracle = material.subject(niah_oracle(material, name), NIAH_LENGTH)
        found = _scores(f"lm-eval:niah_{name}", oracle, _niah_options(material, name))
        yield Line(f"lm-eval niah_{name}", "oracle", "accuracy", _value(found, "accuracy"), 1.0)
