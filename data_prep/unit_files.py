"""A unit of documents, tokenised: two files that one task writes and later stages read.

    NNNNNN-KEY.tokens    the tokens of its documents one after the other, [bos] ... [eos] each
    NNNNNN-KEY.npz       what is known of each document; written last: without it nothing was done

Memory holds one part of one document, and some 200 bytes for each document of the unit.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.dataset_folder import write_atomically
from data_prep.formats import Document, Skipped, Unreadable
from data_prep.near_duplicates import PERMUTATIONS, Signer
from data_prep.overlap import EvaluationTexts, Matcher
from data_prep.shards import token_dtype
from data_prep.sources import Unit, name_key, read_documents
from data_prep.tokenizer import Tokenizer

NAMED_EXAMPLES = 5
TRAIN, VALIDATION = 0, 1
_PENDING_TOKENS = 1 << 16


@dataclass(frozen=True)
class UnitJob:
    """What decides a unit's files, `path` (that of the .npz) apart."""

    unit: Unit
    source: int
    fraction: float  # of its documents, by name, that go to validation
    seed: int
    min_tokens: int | None
    max_tokens: int | None
    path: str = ""


@dataclass(frozen=True)
class Tools:
    """What every task of a run shares."""

    tokenizer: Tokenizer
    texts: EvaluationTexts | None  # to look for in training documents
    drop_overlaps: bool
    sign: bool  # for near duplicates


class UnitCounts(NamedTuple):
    """Of one unit, for the progress line."""

    documents: int
    tokens: int


@dataclass
class Reasons:
    """How often each reason came, and the first names."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str, count: int = 1) -> None:
        """Count one document, or `count` of which one is named."""
        self.counts[reason] += count
        named = self.examples.setdefault(reason, [])
        if len(named) < NAMED_EXAMPLES:
            named.append(name.encode("utf-8", "backslashreplace").decode("utf-8"))

    def merge(self, counts: dict[str, int], examples: dict[str, list[str]]) -> None:
        """Take over those of another unit, which comes later."""
        self.counts.update(counts)
        for reason, names in examples.items():
            mine = self.examples.setdefault(reason, [])
            mine += names[: NAMED_EXAMPLES - len(mine)]


def tokenise_unit(tools: Tools, job: UnitJob) -> UnitCounts:
    """Read, filter and tokenise the documents of a unit; OSError where they cannot be written."""
    path = Path(job.path)
    dtype = np.dtype(token_dtype(tools.tokenizer.vocab_size))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    documents = _Documents()
    try:
        with temporary.open("wb") as file:
            for document in read_documents(job.unit):
                if isinstance(document, Skipped):
                    documents.skipped.add(document.reason, document.name)
                else:
                    _take(document, file, tools, job, documents, dtype)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, _tokens_path(path))
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk shall not be filled by what failed
        raise
    write_atomically(path, documents.to_bytes(tools.sign))
    skipped = sum(documents.skipped.counts.values())
    return UnitCounts(len(documents.lengths) + skipped, sum(documents.lengths))


@dataclass
class _Documents:
    """Columns of the unit's table, one entry a document."""

    names: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)
    coins: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    signatures: list[np.ndarray] = field(default_factory=list)
    skipped: Reasons = field(default_factory=Reasons)
    overlapping: Reasons = field(default_factory=Reasons)

    def to_bytes(self, signed: bool) -> bytes:
        record = {
            "names": self.names,
            "skipped": [self.skipped.counts, self.skipped.examples],
            "overlapping": [self.overlapping.counts, self.overlapping.examples],
        }
        arrays: dict[str, Any] = {
            "record": np.frombuffer(json.dumps(record).encode(), np.uint8),
            "lengths": np.array(self.lengths, np.int64),
            "text_bytes": np.array(self.text_bytes, np.int64),
            "splits": np.array(self.splits, np.uint8),
            "coins": np.array(self.coins, np.uint64),
            "digests": np.frombuffer(b"".join(self.digests), np.uint64).reshape(-1, 2),
        }
        if signed:
            arrays["signatures"] = np.array(self.signatures, np.uint32).reshape(-1, PERMUTATIONS)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()


def _take(
    document: Document,
    file: Any,
    tools: Tools,
    job: UnitJob,
    documents: _Documents,
    dtype: np.dtype,
) -> None:
    """Append a document to the file and the table, or count why not."""
    begin = file.tell()
    digest = hashlib.blake2b(digest_size=16)
    matcher = Matcher(tools.texts) if tools.texts is not None else None
    signer = Signer() if tools.sign else None
    text_bytes = 0

    def observed() -> Iterator[str]:
        nonlocal text_bytes
        for part in document.parts:
            encoded = part.encode("utf-8")
            digest.update(encoded)
            text_bytes += len(encoded)
            if matcher is not None:
                matcher.feed(part)
            if signer is not None:
                signer.feed(part)
            yield part

    def refuse(reason: str) -> None:
        file.seek(begin)
        file.truncate()
        documents.skipped.add(reason, document.name)

    length = 0
    pending: list[np.ndarray] = []
    pending_tokens = 0
    try:
        for array in tools.tokenizer.encode_document(observed(), dtype):
            pending.append(array)
            pending_tokens += len(array)
            length += len(array)
            if pending_tokens >= _PENDING_TOKENS:
                file.write(np.concatenate(pending).tobytes())
                pending, pending_tokens = [], 0
    except Unreadable as error:
        refuse(str(error))
        return
    file.write(np.concatenate(pending).tobytes() if pending else b"")
    if job.min_tokens is not None and length < job.min_tokens:
        refuse(f"shorter than min-tokens {job.min_tokens}")
        return
    if job.max_tokens is not None and length > job.max_tokens:
        refuse(f"longer than max-tokens {job.max_tokens}")
        return
    split = VALIDATION if name_key(document.name, job.seed) < job.fraction * 2**64 else TRAIN
    if matcher is not None and split == TRAIN and (text := matcher.finish()) is not None:
        if tools.drop_overlaps:
            refuse(f"overlaps evaluation text {text}")
            return
        documents.overlapping.add(f"overlaps evaluation text {text}", document.name)
    documents.names.append(document.name)
    documents.lengths.append(length)
    documents.text_bytes.append(text_bytes)
    documents.splits.append(split)
    documents.coins.append(name_key(f"weight\0{document.name}", job.seed))
    documents.digests.append(digest.digest())
    if signer is not None:
        documents.signatures.append(signer.finish())


class UnitTable:
    """The .npz of a unit; columns are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def column(self, name: str) -> np.ndarray:
        """lengths, text_bytes [n] int64; splits [n] uint8; coins [n], digests [n, 2] uint64;
        signatures [n, PERMUTATIONS] uint32.
        """
        with np.load(self.path, allow_pickle=False) as arrays:
            return arrays[name]

    def record(self) -> dict[str, Any]:
        """names; skipped and overlapping as [counts, examples]."""
        return json.loads(self.column("record").tobytes())

    def tokens(self, dtype: np.dtype) -> np.ndarray:
        """All tokens of the unit, mapped from disk."""
        path = _tokens_path(self.path)
        if path.stat().st_size == 0:
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r")


def _tokens_path(path: Path) -> Path:
    return path.with_suffix(".tokens")
