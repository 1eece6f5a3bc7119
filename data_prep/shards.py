"""The data set on disk: MDS shards of packed rows, and the manifest that vouches for them.

    DATASET/manifest.json       Manifest below; written last: a folder without it is no data set
    DATASET/tokenizer.model     text data sets only
    DATASET/train/              index.json + shard.NNNNN.mds; of text also row_lengths.npy, [rows]
                                int64: tokens of the longest document that the row has a part of
    DATASET/validation/         the same, if there is a validation split

Columns of a row of T tokens (plain arrays; a pickle column is refused on reading):

    tokens            [T] uint16, uint32 if vocab_size > 65536
    document_starts   [n] uint32, ascending; 0 is always in it, also where a document goes on
    labels            [T] int32; synthetic tasks only. Text rows derive theirs from the tokens.

Trust runs manifest -> sha256 of index.json -> size and sha256 of each shard, checked before first
use.

Why Rows reads through streaming's MDSReader and not through StreamingDataset: rows are asked for
by number, the order being the trainer's business. Measured on 40000 local rows of 2048 tokens, both
take about 20 microseconds of processor time a random row; but each StreamingDataset makes six files
of shared memory and two locks, which stay behind after SIGKILL, and synchronises all ranks when it
is made. Neither notices a flipped bit in a local shard (StreamingDataset checks hashes only of what
it downloads), so that check is ours anyway. MDSReader holds no open file and no lock: any number of
ranks and forked or spawned DataLoader workers can use one Rows each, or a copy of the same.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from data_prep.shard_cache import cache_at
from data_prep.tokenizer import Tokenizer

FORMAT_VERSION: Final = 1
IGNORED_LABEL = -100
SHARD_BYTES = 64 << 20
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.model"
INDEX_NAME = "index.json"
ROW_LENGTHS_NAME = "row_lengths.npy"
SettingValue = str | int | float | bool | None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SplitFacts(_Record):
    """What one split holds."""

    rows: int
    tokens: int  # rows * row_tokens
    documents: int  # documents whose first token is in a written row
    bytes: int  # UTF-8 bytes of text that the written tokens stand for; 0 without a tokenizer
    dropped_tokens: dict[Literal["tail"], int]  # the last, incomplete row
    index_sha256: str
    row_lengths_sha256: str | None = None
    repeats: int = 0  # further copies of documents, begun in a written row, that weights asked for
    # Of all documents chosen for the split, copies too, the dropped tail's among them: how many
    # have 2^i <= tokens < 2^(i + 1), and their tokens; i = 0, 1, ...
    length_documents: list[int] = []
    length_tokens: list[int] = []


class SourceFacts(_Record):
    """What a training source gives to the data set, before the dropped tail."""

    name: str
    documents: int  # distinct ones that are used
    tokens: int  # copies too
    rate: float  # how often a document is used, on average over length weights of 1


class SkippedDocuments(_Record):
    """Documents that were read but not written, for one reason."""

    count: int
    examples: list[str]  # names of the first few


class Manifest(_Record):
    """DATASET/manifest.json. documents_in = documents in the splits + skipped, always."""

    format_version: Literal[1] = FORMAT_VERSION
    kind: str  # "text", "mqar"
    tokenizer_sha256: str | None
    vocab_size: int
    row_tokens: int
    dtype: Literal["uint16", "uint32"]
    splits: dict[str, SplitFacts]
    documents_in: int
    skipped: dict[str, SkippedDocuments]
    inputs: list[str]  # as they were typed; for the reader only
    settings: dict[str, SettingValue]  # equal settings give equal rows
    seed: int
    sources: list[SourceFacts] = []
    # Written although they share n-grams with an evaluation text, where that was only to be told.
    overlapping: dict[str, SkippedDocuments] = {}
    # `pack` arguments that make these rows, without tokenizer, output and row-tokens.
    arguments: list[str] = []

    @model_validator(mode="after")
    def _documents_add_up(self) -> Manifest:
        written = sum(split.documents for split in self.splits.values())
        skipped = sum(entry.count for entry in self.skipped.values())
        if self.documents_in != written + skipped:
            raise ValueError(
                f"documents do not add up: got {self.documents_in} in; expected {written} written "
                f"+ {skipped} skipped"
            )
        return self


@dataclass(frozen=True)
class Row:
    """One training row of T tokens; all arrays int64 and writable.

    labels[t] is the token that logits[t] have to predict, or -100 where nothing is scored.
    """

    tokens: np.ndarray
    labels: np.ndarray
    document_starts: np.ndarray


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest column type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_manifest(dataset: str | Path) -> Manifest:
    """The manifest of a finished data set. Raises FileNotFoundError or ValueError in one line."""
    path = Path(dataset) / MANIFEST_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{dataset} is not a data set: got no manifest.json in it; expected the output of "
            "`python -m data_prep pack` or `synth`, run to its end"
        )
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise ValueError(
            f"{path} is damaged or of another version: {where}: {first['msg']}; expected format "
            f"version {FORMAT_VERSION}; pack the data set again"
        ) from None


def read_tokenizer(dataset: str | Path) -> Tokenizer:
    """The tokenizer of a text data set, checked against the manifest."""
    expected = read_manifest(dataset).tokenizer_sha256
    if expected is None:
        raise ValueError(f"{dataset} has no tokenizer: its rows are synthetic, not text")
    tokenizer = Tokenizer.load(Path(dataset) / TOKENIZER_NAME)
    if tokenizer.sha256 != expected:
        raise ValueError(
            f"{dataset}/tokenizer.model is not the one the rows were made with: got sha256 "
            f"{tokenizer.sha256}; expected {expected}; pack the data set again"
        )
    return tokenizer


def pack_command(manifest: Manifest, dataset: Path, row_tokens: int) -> str:
    """The command that makes the same data set with rows of another length."""
    if not manifest.arguments:
        return f"the command that made it, with rows of {row_tokens} tokens"
    words = ["python", "-m", "data_prep", "pack", *manifest.arguments]
    words += ["--tokenizer", str(dataset / TOKENIZER_NAME)]
    words += ["--output", f"{dataset}-{row_tokens}", "--row-tokens", str(row_tokens)]
    return shlex.join(words)


class ShardWriter:
    """Writes the rows of one split into a new folder; equal rows give equal bytes."""

    def __init__(
        self,
        folder: Path,
        *,
        row_tokens: int,
        vocab_size: int,
        with_labels: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        from streaming import MDSWriter  # seconds: it imports torchvision and transformers

        self._dtype = token_dtype(vocab_size)
        columns = {
            "tokens": f"ndarray:{self._dtype}:{row_tokens}",
            "document_starts": "ndarray:uint32",
        }
        if with_labels:
            columns["labels"] = f"ndarray:int32:{row_tokens}"
        self._folder = folder
        self._writer = MDSWriter(
            out=str(folder), columns=columns, hashes=["sha256"], size_limit=shard_bytes
        )
        self.rows = 0

    def write(
        self, tokens: np.ndarray, document_starts: np.ndarray, labels: np.ndarray | None = None
    ) -> None:
        """Append a row: tokens [row_tokens], document_starts [n], labels [row_tokens] if any."""
        sample = {
            "tokens": tokens.astype(self._dtype, copy=False),
            "document_starts": document_starts.astype("uint32", copy=False),
        }
        if labels is not None:
            sample["labels"] = labels.astype("int32", copy=False)
        self._writer.write(sample)
        self.rows += 1

    def finish(self) -> str:
        """Complete the split on disk; returns the sha256 of its index.json."""
        self._writer.finish()
        for path in sorted(self._folder.iterdir()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return hashlib.sha256((self._folder / INDEX_NAME).read_bytes()).hexdigest()


class Rows:
    """Random access to the rows of one split: `len(rows)`, `rows[i] -> Row`.

    Raises FileNotFoundError or ValueError if the split, its index or (on first use of a shard) the
    shard is missing or not what was written. Safe to copy into workers by fork or pickle. A data
    set in a cache (data_prep/shard_cache.py) is fetched as it is read.
    """

    def __init__(self, dataset: str | Path, split: str) -> None:
        self.dataset = Path(dataset)
        self.split = split
        self.manifest = read_manifest(dataset)
        if split not in self.manifest.splits:
            raise ValueError(
                f"{dataset} has no split {split!r}: got {', '.join(self.manifest.splits)}; choose "
                "one of these, or pack with --validation or --validation-fraction"
            )
        facts = self.manifest.splits[split]
        index = _read_checked(self.dataset / split / INDEX_NAME, facts.index_sha256)
        self._shards = [
            _reader(self.dataset, split, entry) for entry in json.loads(index)["shards"]
        ]
        self.shard_ends = np.cumsum([len(shard) for shard in self._shards])
        self.shard_bytes = [int(shard.raw_data.bytes) for shard in self._shards]
        self._cache = cache_at(self.dataset)
        self.cache_limit_bytes = self._cache.limit_bytes if self._cache is not None else None
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return self.manifest.splits[self.split].rows

    def __getitem__(self, index: int) -> Row:
        return self.cut(index, 0, self.manifest.row_tokens)

    def cut(self, index: int, begin: int, end: int) -> Row:
        """Tokens [begin, end) of row `index`, as a row of its own."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"row out of range: got {index}; expected 0 to {len(self) - 1} in "
                f"{self.dataset}/{self.split}"
            )
        sample = self._sample(index)
        starts = sample["document_starts"].astype(np.int64)
        tokens = sample["tokens"][begin:end].astype(np.int64)
        inside = starts[(starts > begin) & (starts < end)] - begin
        labels = sample.get("labels")
        if labels is None:
            labels = next_token_labels(tokens, inside)
            if end < self.manifest.row_tokens and not np.any(starts == end):
                labels[-1] = sample["tokens"][end]  # the document goes on in the next cut
        else:
            labels = labels[begin:end].astype(np.int64)
        return Row(tokens, labels, np.concatenate([[0], inside]))

    def row_lengths(self) -> np.ndarray | None:
        """[rows] int64: tokens of the longest document, whole, that the row has a part of.

        None where the data set does not record it.
        """
        sha256 = self.manifest.splits[self.split].row_lengths_sha256
        if sha256 is None:
            return None
        content = _read_checked(self.dataset / self.split / ROW_LENGTHS_NAME, sha256)
        return np.load(io.BytesIO(content), allow_pickle=False)

    def verify(self) -> None:
        """Check size and hash of every shard now instead of on first use."""
        for shard in range(len(self._shards)):
            self._verify(shard)

    def problems(self) -> Iterator[str]:
        """One line for each shard that is missing or damaged; reads all of them."""
        for shard in range(len(self._shards)):
            try:
                self._verify(shard)
            except (ValueError, OSError) as error:
                yield str(error)

    def _sample(self, index: int) -> dict[str, np.ndarray]:
        shard = int(np.searchsorted(self.shard_ends, index, side="right"))
        first = int(self.shard_ends[shard - 1]) if shard else 0
        while True:
            self._verify(shard)
            try:
                return self._shards[shard][index - first]
            except FileNotFoundError:
                if self._cache is None:
                    raise
                # Another process has removed it from the cache; it is fetched again.

    def _verify(self, shard: int) -> None:
        info = self._shards[shard].raw_data
        path = self.dataset / self.split / info.basename
        sha256 = info.hashes["sha256"]
        if self._cache is not None and self._cache.use(path, sha256, info.bytes):
            self._verified.add(shard)
        if shard in self._verified:
            return
        _check_file(path, sha256, info.bytes)
        self._verified.add(shard)


def next_token_labels(tokens: np.ndarray, document_starts: np.ndarray) -> np.ndarray:
    """[T] int64: the following token of the same document and row, -100 where there is none."""
    labels = np.full_like(tokens, IGNORED_LABEL)
    labels[:-1] = tokens[1:]
    labels[document_starts[document_starts > 0] - 1] = IGNORED_LABEL
    return labels


def _reader(dataset: Path, split: str, entry: dict[str, Any]) -> Any:
    """streaming's reader of one shard; only plain arrays in an uncompressed file are accepted."""
    from streaming.base.format import reader_from_json

    encodings = entry.get("column_encodings", [])
    if entry.get("compression") or not all(e.startswith("ndarray:") for e in encodings):
        raise ValueError(
            f"{dataset}/{split}/index.json is not ours: got columns {encodings}, compression "
            f"{entry.get('compression')}; expected plain arrays; pack the data set again"
        )
    return reader_from_json(str(dataset), split, entry)


def _read_checked(path: Path, sha256: str) -> bytes:
    _check_file(path, sha256, None)
    return path.read_bytes()


def _check_file(path: Path, sha256: str, size: int | None) -> None:
    """Raise FileNotFoundError or ValueError unless the file is what the writer wrote."""
    wanted = f"sha256 {sha256}" + ("" if size is None else f" and {size} bytes")
    remedy = "copy this file again from its source, or pack the data set again"
    try:
        found_size = path.stat().st_size
        if size is not None and found_size != size:
            raise ValueError(
                f"{path} is damaged: got {found_size} bytes; expected {wanted}; {remedy}"
            )
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: expected {wanted}; {remedy}") from None
    if digest.hexdigest() != sha256:
        raise ValueError(
            f"{path} is damaged: got sha256 {digest.hexdigest()}; expected {wanted}; {remedy}"
        )
