"""Loss against position in long documents: does a model go on using what stands far back?

Documents are those of `--text` (text files, or JSON lines with a field "text"; plain or packed).
Each is read as BOS and its tokens, and cut into blocks of `length` tokens, one after the other; a
block starts from an empty memory, and never straddles documents. The last, incomplete block is left
out, so that every position has equally many blocks. With `context` tokens of the block read, the
next one is scored:

    nll(a, b)        mean nats a token over a <= context <= b; the buckets end at powers of two and
                     at multiples of 1,024
    nll_short(a, b)  the same tokens, but reading no more than the last 512 (windows of 512 that
                     move on by 128): where it equals nll, the context before that is not used

The standard error takes each document as a cluster: blocks of one book are not independent.
Settings hold the bucket, so results of several models can be compared bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np
import torch

from data_prep.formats import Document
from data_prep.sources import UNIT_BYTES, list_files, make_units, read_documents
from eval.result import Options, Result, Subject
from eval.samples import Values
from eval.scoring import Score, losses, mean_and_error

VERSION = 1
PAIRED = ("nll",)
SHORT_WINDOW, SHORT_STRIDE = 512, 128
EVERY = 1024


def bucket_ends(length: int) -> list[int]:
    """The last position of each bucket: 1, 2, 4, ... and 1024, 2048, 3072, ..., up to `length`."""
    powers = {1 << i for i in range(length.bit_length())}
    return sorted(end for end in {*powers, *range(EVERY, length, EVERY), length} if end <= length)


def check(subject: Subject, options: Options) -> None:
    """Refuse a missing text, a length that the model cannot read, and documents all shorter."""
    tokenizer = subject.need_tokenizer("loss-by-position")
    documents = _documents(options)
    for length in _lengths(subject, options):
        if length < 2:
            raise ValueError(f"--lengths is too short: got {length}; expected at least 2 tokens")
        subject.check_length("a block", length)
        # Every token stands for at least one byte, so most documents need no encoding.
        if not any(
            len(text.encode()) > length and len(tokenizer.encode(text)) > length
            for text in documents
        ):
            raise ValueError(
                f"no document is long enough: got {len(documents)} documents, all of fewer than "
                f"{length + 1} tokens; expected a longer one; use a smaller --lengths"
            )


def _lengths(subject: Subject, options: Options) -> tuple[int, ...]:
    return options.lengths or (subject.usual_length,)


def _documents(options: Options) -> list[str]:
    if not options.texts:
        raise ValueError(
            "task loss-by-position has no text: got no --text; expected long documents, text or "
            "JSON lines; add --text FILE"
        )
    units = make_units(list_files([str(path) for path in options.texts]), UNIT_BYTES)
    found = (one for unit in units for one in read_documents(unit))
    # A document can be read once, while the reading is at it.
    documents = [one.text for one in found if isinstance(one, Document)]
    if not documents:
        raise ValueError(
            f"no document can be read: got {', '.join(map(str, options.texts))}; expected UTF-8 "
            'text, or JSON lines with a field "text"'
        )
    return documents


def loss_by_position(subject: Subject, options: Options) -> list[Result]:
    """nll and nll_short of every bucket, for every length of `options.lengths`."""
    tokenizer = subject.need_tokenizer("loss-by-position")
    documents = _documents(options)
    digest = sha256("\0".join(documents).encode()).hexdigest()[:16]
    results = []
    for length in _lengths(subject, options):
        blocks = _blocks(
            [[tokenizer.bos_id, *tokenizer.encode(text)] for text in documents],
            length,
            options.samples,
        )
        settings = {
            "text": [path.name for path in options.texts],
            "text_sha256": digest,
            "length": length,
            "tokenizer_sha256": tokenizer.sha256[:16],
            "bos": "at the start of each document",
            **subject.length_mark(length),
        }
        results += _one(subject, blocks, length, settings)
    return results


def _blocks(documents: list[list[int]], length: int, most: int) -> list[tuple[int, int, list[int]]]:
    """(document, block in it, length + 1 tokens), at most `most`: first blocks first."""
    found = [
        (block, document)
        for document, tokens in enumerate(documents)
        for block in range((len(tokens) - 1) // length)
    ]
    return [
        (d, b, documents[d][b * length : (b + 1) * length + 1]) for b, d in sorted(found)[:most]
    ]


def _one(
    subject: Subject,
    blocks: Sequence[tuple[int, int, list[int]]],
    length: int,
    settings: dict,
) -> list[Result]:
    ends = bucket_ends(length)

    def run(places: list[int]) -> Iterator[Values]:
        for place in places:
            tokens = blocks[place][2]
            values: Values = {
                "document": blocks[place][0],
                "buckets": _by_bucket(_position_losses(subject, tokens), ends),
            }
            values["nll"] = sum(values["buckets"]) / length
            if length > SHORT_WINDOW:
                values["short_buckets"] = _by_bucket(_short_losses(subject, tokens), ends)
            yield values

    log = subject.samples.open("loss-by-position", VERSION, settings)
    keys = [f"{document}.{block}" for document, block, _ in blocks]
    values = log.scored(keys, run, f"loss by position, blocks of {length}")
    log.close()
    settings = {**settings, "blocks": len(blocks)}
    results = []
    for column, metric in (("buckets", "nll"), ("short_buckets", "nll_short")):
        if column not in values[0]:
            continue
        for i, end in enumerate(ends):
            start = ends[i - 1] + 1 if i else 1
            results.append(
                _result(metric, values, column, i, {**settings, "from": start, "to": end})
            )
    return results


def _result(metric: str, values: Sequence[Values], column: str, i: int, settings: dict) -> Result:
    tokens = settings["to"] - settings["from"] + 1
    clusters: dict[int, Score] = {}
    for one in values:
        block = Score(one[column][i], tokens, 0)
        clusters[one["document"]] = clusters.get(one["document"], Score(0.0, 0, 0)) + block
    mean, error = mean_and_error(list(clusters.values()))
    return Result(
        task="loss-by-position",
        version=VERSION,
        metric=metric,
        value=mean,
        unit="nats per token",
        count=tokens * len(values),
        standard_error=error,
        settings=settings,
    )


@torch.no_grad()
def _position_losses(subject: Subject, tokens: list[int]) -> np.ndarray:
    """[length] nats of tokens[1:], each read after all that stand before it in the block."""
    ids = torch.tensor([tokens], device=subject.device)
    nll, _ = losses(subject.model(ids[:, :-1]), ids[:, 1:])
    return nll[0].cpu().numpy()


@torch.no_grad()
def _short_losses(subject: Subject, tokens: list[int]) -> np.ndarray:
    """The same after at most the last SHORT_WINDOW tokens."""
    out = np.empty(len(tokens) - 1)
    done = 0
    while done < len(out):
        new = SHORT_WINDOW if done == 0 else SHORT_STRIDE
        end = min(done + new, len(out))
        start = max(0, end - SHORT_WINDOW)
        out[done:end] = _position_losses(subject, tokens[start : end + 1])[done - start :]
        done = end
    return out


def _by_bucket(nll: np.ndarray, ends: Sequence[int]) -> list[float]:
    """Summed nats of each bucket."""
    return [float(part.sum()) for part in np.split(nll, ends[:-1])]
