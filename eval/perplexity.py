"""Perplexity and bits per byte of text files or of a split of a data set.

What is measured: nll = -sum of ln p(token), over every scored token, each scored once.

    nll_per_token   nll / tokens           nats; the number that training logs as loss
    perplexity      exp(nll / tokens)      per token, so it depends on the tokenizer
    bits_per_byte   nll / (ln 2 * bytes)   survives a change of tokenizer: compare models by it

Text files: each file is one document. All its tokens are scored, the first one after BOS; nothing
is scored for the end of the document; bytes are those of the file. Two files never share a window.

    file "to be or", window 2     reads   BOS to | to be |  ... see scoring.rolling_windows
                                  scores  to  be |    or |

Data set split: packed rows exactly as training reads them. Scored are the labels of the row: the
next token of the same document in the same row. Hence excluded: the first token of a document piece
(nothing of its document stands before it in the row). Included: the EOS that ends a document. Bytes
are those of the scored tokens (EOS has none), so numerator and denominator cover the same text.
Rows that are longer than those the model was trained on are cut to its length, as training cuts
them; a cut forgets what stands before it, and every label is scored all the same.

    unigram_entropy   nats; entropy of the scored tokens' own frequencies: the lowest loss that a
                      model without any context can have, so a trained one must be below it

Source: bits per byte as sum of nats over sum of bytes, as in The Pile (arXiv 2101.00027, section
3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np

from data_prep.shards import IGNORED_LABEL, Rows, read_manifest
from eval.result import Options, Result, Subject
from eval.samples import SampleLog, Values
from eval.scoring import (
    Score,
    check_stride,
    exponential,
    mean_and_error,
    rolling_windows,
    row_batches,
    score,
    total,
    window_batches,
)
from eval.text_files import read_bytes, read_text

VERSION = 1
PAIRED = ("nll",)


def check(subject: Subject, options: Options) -> None:
    """Refuse missing or unreadable text, another tokenizer's data set, windows and rows that the
    model cannot read."""
    if not options.texts and options.dataset is None:
        raise ValueError(
            "task perplexity has no text: got neither --text nor --dataset; expected one of them; "
            "add --text FILE or --dataset DATASET"
        )
    if options.texts:
        subject.need_tokenizer("perplexity")
        window_and_stride(subject, options)
        for path in options.texts:
            read_text(path)
    if options.dataset is not None:
        _open_rows(subject, options, options.dataset)[0].verify()


def perplexity(subject: Subject, options: Options) -> list[Result]:
    """nll_per_token, perplexity and bits_per_byte of the texts, of the data set split, or of
    both."""
    results = []
    if options.texts:
        results += text_perplexity(subject, options)
    if options.dataset is not None:
        results += dataset_perplexity(subject, options, options.dataset)
    return results


def score_documents(
    subject: Subject, documents: list[list[int]], prefix: int, options: Options, log: SampleLog
) -> list[Score]:
    """One Score per document; documents never share a window. Empty documents score nothing.

    Args:
        prefix: the id before the first token. log: keeps the documents' scores, by their place.
    """
    window, stride = window_and_stride(subject, options)

    def score_missing(places: list[int]) -> Iterator[Values]:
        windows = [
            list(rolling_windows(documents[i], prefix, window=window, stride=stride))
            for i in places
        ]
        batches = window_batches((w for part in windows for w in part), options.batch_tokens)
        scores = score(subject.model, batches, subject.device)
        for part in windows:
            yield total(next(scores) for _ in part).values()

    keys = [str(i) for i in range(len(documents))]
    return [Score(**values) for values in log.scored(keys, score_missing, "documents")]


def window_and_stride(subject: Subject, options: Options) -> tuple[int, int]:
    """Tokens that a window of a rolling score reads and tokens that it scores; ValueError where
    they do not fit the model or each other."""
    window = subject.usual_length if options.window is None else options.window
    subject.check_length("the scoring window", window)
    stride = window if options.stride is None else options.stride
    check_stride(window, stride)
    return window, stride


def window_settings(subject: Subject, options: Options) -> dict[str, int | str]:
    """The settings of a rolling score that change its value."""
    window, stride = window_and_stride(subject, options)
    policy: dict[str, int | str] = {
        "window": window,
        "stride": stride,
        "bos": "first window of each document",
    }
    return policy | subject.length_mark(window)


def text_perplexity(subject: Subject, options: Options) -> list[Result]:
    """Perplexity of text files; see the module's text."""
    tokenizer = subject.need_tokenizer("perplexity")
    documents = [tokenizer.encode(read_text(path)) for path in options.texts]
    settings = {
        "text": [path.name for path in options.texts],
        "text_sha256": [sha256(read_bytes(path)).hexdigest()[:16] for path in options.texts],
        **window_settings(subject, options),
    }
    log = subject.samples.open("perplexity", VERSION, settings)
    scores = score_documents(subject, documents, tokenizer.bos_id, options, log)
    log.close()
    return _results(scores, sum(len(read_bytes(path)) for path in options.texts), settings)


def _open_rows(subject: Subject, options: Options, dataset: Path) -> tuple[Rows, int]:
    """The rows, and how many tokens of one the model reads at a time."""
    tokenizer = subject.need_tokenizer("perplexity")
    manifest = read_manifest(dataset)
    if manifest.kind != "text":
        raise ValueError(
            f"task perplexity reads text: got a data set of kind {manifest.kind!r} in {dataset}; "
            "expected kind 'text'; use --tasks mqar for MQAR rows"
        )
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise ValueError(
            f"tokenizers differ: got data set {dataset} packed with {manifest.tokenizer_sha256}; "
            f"expected the model's tokenizer {tokenizer.sha256}; pack the data with the model's "
            "tokenizer.model"
        )
    length = manifest.row_tokens
    if length > subject.usual_length and not subject.beyond_trained:
        length = subject.usual_length
        if manifest.row_tokens % length:
            raise ValueError(
                f"rows of {dataset} cannot be cut to the length the model was trained on: got "
                f"{manifest.row_tokens} tokens; expected a multiple of {length}; pack the text "
                f"with --row-tokens {length}, or use --text FILE"
            )
    subject.check_length(f"a row of {dataset}", length)
    return Rows(dataset, options.split), length


def dataset_perplexity(subject: Subject, options: Options, dataset: Path) -> list[Result]:
    """Perplexity of a split of a packed data set; see the module's text."""
    rows, length = _open_rows(subject, options, dataset)
    packed = rows.manifest.row_tokens
    pieces = packed // length
    byte_lengths = subject.need_tokenizer("perplexity").token_bytes
    scored_bytes = 0
    frequencies = np.zeros(rows.manifest.vocab_size, dtype=np.int64)
    for i in range(len(rows)):
        labels = rows[i].labels  # the same ones whether rows are cut or not
        labels = labels[labels != IGNORED_LABEL]
        scored_bytes += int(byte_lengths[labels].sum())
        np.add.at(frequencies, labels, 1)

    def score_missing(places: list[int]) -> Iterator[Values]:
        found = (
            rows.cut(i // pieces, i % pieces * length, (i % pieces + 1) * length) for i in places
        )
        triples = ((row.tokens, row.labels, row.document_starts) for row in found)
        batches = row_batches(triples, options.batch_tokens)
        for one in score(subject.model, batches, subject.device):
            yield one.values()

    settings = {
        "dataset": str(dataset),
        "split": options.split,
        "rows_sha256": rows.manifest.splits[options.split].index_sha256,
        "row_tokens": length,
        **({"cut_from_row_tokens": packed} if pieces > 1 else {}),
        "bos": "as packed: first token of each document",
        **subject.length_mark(length),
    }
    log = subject.samples.open("perplexity", VERSION, settings)
    keys = [str(i) for i in range(len(rows) * pieces)]
    scores = [
        Score(**values)
        for values in log.scored(keys, score_missing, f"perplexity: rows of {dataset}")
    ]
    log.close()
    results = _results(scores, scored_bytes, settings)
    entropy = Result(
        task="perplexity",
        version=VERSION,
        metric="unigram_entropy",
        value=unigram_entropy(frequencies),
        unit="nats",
        count=results[0].count,
        standard_error=None,
        settings=results[0].settings,
    )
    return [*results, entropy]


def unigram_entropy(frequencies: np.ndarray) -> float:
    """-sum p ln p in nats of p = frequencies / their sum."""
    p = frequencies[frequencies > 0] / frequencies.sum()
    return float(-np.sum(p * np.log(p)))


def _results(scores: list[Score], size_bytes: int, settings: dict) -> list[Result]:
    everything = total(scores)
    if everything.tokens == 0 or size_bytes == 0:
        raise ValueError(
            f"nothing to score: got {everything.tokens} scored tokens, {size_bytes} bytes; "
            "expected some text"
        )
    mean, error = mean_and_error([s for s in scores if s.tokens])
    perplexity_value = exponential(mean)
    tokens_per_byte_bits = everything.tokens / size_bytes / math.log(2)

    def result(metric: str, value: float, unit: str, count: int, slope: float) -> Result:
        return Result(
            task="perplexity",
            version=VERSION,
            metric=metric,
            value=value,
            unit=unit,
            count=count,
            standard_error=None if error is None else error * slope,
            settings={**settings, "tokens": everything.tokens, "bytes": size_bytes},
        )

    return [
        result("nll_per_token", mean, "nats", everything.tokens, 1.0),
        result("perplexity", perplexity_value, "per token", everything.tokens, perplexity_value),
        result(
            "bits_per_byte", mean * tokens_per_byte_bits, "bits", size_bytes, tokens_per_byte_bits
        ),
    ]
