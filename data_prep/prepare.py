"""The pack command: corpora and a tokenizer in, a data set of packed rows out.

Tokenising runs in parallel, one unit of documents a task, and leaves one file a unit; packing then
reads these files in order in this process. So the data set is the same to the byte for any number
of workers, memory holds a few units, and a run that was killed keeps the units it has done. The
unit files need about as much disk as the finished shards, until these are complete.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset_folder import (
    building,
    finished,
    publish,
    remove,
    write_atomically,
)
from data_prep.pack import pack
from data_prep.parallel import default_workers, run_tasks
from data_prep.progress import byte_progress
from data_prep.shards import (
    Manifest,
    SettingValue,
    ShardWriter,
    SkippedDocuments,
    SplitFacts,
    token_dtype,
)
from data_prep.sources import (
    UNIT_BYTES,
    Segment,
    Skipped,
    Unit,
    held_out,
    list_files,
    make_units,
    read_documents,
    unit_size,
)
from data_prep.tokenizer import Tokenizer

KIND = "text"
NAMED_EXAMPLES = 5
TAIL_REASON = "begins in the dropped tail"


@dataclass(frozen=True, kw_only=True)
class PackRequest:
    """What to pack; checked when made. Sizes in tokens, fraction of documents."""

    inputs: tuple[str, ...]
    row_tokens: int
    validation_inputs: tuple[str, ...] = ()
    validation_fraction: float = 0.0
    include: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.row_tokens < 2:
            raise ValueError(f"row-tokens is too small: got {self.row_tokens}; expected at least 2")
        check_fraction(self.validation_fraction)
        if self.validation_inputs and self.validation_fraction:
            raise ValueError(
                "validation is given twice: got --validation and --validation-fraction; expected "
                "one of them; leave one out"
            )


@dataclass
class _Tally:
    """Counts that the manifest reports."""

    documents_in: int = 0
    skipped: dict[str, SkippedDocuments] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        before = self.skipped.get(reason, SkippedDocuments(count=0, examples=[]))
        named = name.encode("utf-8", "backslashreplace").decode("utf-8")
        examples = (before.examples + [named])[:NAMED_EXAMPLES]
        self.skipped[reason] = SkippedDocuments(count=before.count + 1, examples=examples)


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless 0 <= fraction < 1."""
    if not 0 <= fraction < 1:
        raise ValueError(
            f"validation-fraction is out of range: got {fraction}; expected 0 <= fraction < 1"
        )


def prepare(
    request: PackRequest, tokenizer: Tokenizer, output: Path, workers: int | None = None
) -> tuple[Manifest, bool]:
    """Make the data set at `output` unless it is there already; returns (manifest, made now).

    workers: processes that tokenise; None decides by the amount of work. Raises ValueError or
    FileNotFoundError in one line for anything wrong with the request, the corpus or the output.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is too small: got {workers}; expected at least 1")
    train_files = list_files(request.inputs, request.include)
    validation_files = (
        list_files(request.validation_inputs, request.include) if request.validation_inputs else []
    )
    _refuse_overlap(train_files, validation_files)
    settings: dict[str, SettingValue] = {
        "tokenizer_sha256": tokenizer.sha256,
        "row_tokens": request.row_tokens,
        "validation_fraction": request.validation_fraction,
        "seed": request.seed,
        "inputs_sha256": _fingerprint(train_files),
        "validation_inputs_sha256": _fingerprint(validation_files),
    }
    if (manifest := finished(output, KIND, settings)) is not None:
        return manifest, False
    with building(output) as work:
        jobs = [
            (unit, request.validation_fraction, request.seed)
            for unit in make_units(train_files, UNIT_BYTES)
        ] + [(unit, 1.0, request.seed) for unit in make_units(validation_files, UNIT_BYTES)]
        unit_files = _tokenise(jobs, tokenizer, work / "units", workers)
        manifest = _write_splits(request, tokenizer, settings, unit_files, work)
        publish(output, manifest, tokenizer.model)
    return manifest, True


def tokenise_unit(tokenizer: Tokenizer, unit: Unit, fraction: float, seed: int, path: str) -> None:
    """Write the documents of a unit as arrays: per split all tokens and each document's length.

    fraction of the documents go to validation, by name; the rest to train.
    """
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    tokens: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
    names: dict[str, list[str]] = {"train": [], "validation": []}
    skipped: list[tuple[str, str]] = []
    for document in read_documents(unit):
        if isinstance(document, Skipped):
            skipped.append((document.reason, document.name))
            continue
        split = "validation" if held_out(document.name, fraction, seed) else "train"
        tokens[split].append(tokenizer.encode_array(document.text, dtype))
        names[split].append(document.name)
    record = json.dumps({"names": names, "skipped": skipped}).encode()
    arrays: dict[str, Any] = {"record": np.frombuffer(record, np.uint8)}
    for split, documents in tokens.items():
        arrays[f"{split}_tokens"] = np.concatenate([np.empty(0, dtype), *documents])
        arrays[f"{split}_lengths"] = np.array([len(d) for d in documents], np.int64)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(Path(path), buffer.getvalue())


def _tokenise(
    jobs: Sequence[tuple[Unit, float, int]], tokenizer: Tokenizer, folder: Path, workers: int | None
) -> list[Path]:
    """The unit files, in order; those that a killed run finished are not made again."""
    folder.mkdir(exist_ok=True)
    paths = []
    for n, job in enumerate(jobs):
        key = hashlib.sha256(repr((tokenizer.sha256, job)).encode("utf-8", "surrogateescape"))
        paths.append(folder / f"{n:06d}-{key.hexdigest()[:16]}.npz")
    for stale in set(folder.iterdir()) - set(paths):
        stale.unlink()
    missing = [n for n, path in enumerate(paths) if not path.exists()]
    sizes = [unit_size(jobs[n][0]) for n in missing]
    if workers is None:
        workers = default_workers(sum(sizes))
    todo = [(*jobs[n], str(paths[n])) for n in missing]
    with byte_progress("tokenising", sum(sizes)) as advance:
        for index in run_tasks(tokenise_unit, tokenizer, todo, workers):
            advance(sizes[index])
    return paths


def _write_splits(
    request: PackRequest,
    tokenizer: Tokenizer,
    settings: Mapping[str, SettingValue],
    unit_files: Sequence[Path],
    work: Path,
) -> Manifest:
    tally = _Tally()
    for path in unit_files:
        record = _load_record(path)
        tally.documents_in += sum(map(len, record["names"].values())) + len(record["skipped"])
        for reason, name in record["skipped"]:
            tally.skip(reason, name)
    if tally.documents_in == sum(entry.count for entry in tally.skipped.values()):
        reasons = "; ".join(
            f"{entry.count} {reason} (such as {entry.examples[0]})"
            for reason, entry in tally.skipped.items()
        )
        raise ValueError(
            f"no document could be read: got {reasons or 'only blank lines'}; expected UTF-8 text "
            'or JSON lines with a string field "text"'
        )
    wants_validation = bool(request.validation_inputs) or request.validation_fraction > 0
    splits = {
        split: _write_split(split, request.row_tokens, tokenizer, unit_files, work, tally)
        for split in (("train", "validation") if wants_validation else ("train",))
    }
    return Manifest(
        kind=KIND,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        row_tokens=request.row_tokens,
        dtype=token_dtype(tokenizer.vocab_size),
        splits=splits,
        documents_in=tally.documents_in,
        skipped=tally.skipped,
        inputs=[*request.inputs, *request.validation_inputs],
        settings=dict(settings),
        seed=request.seed,
    )


def _write_split(
    split: str,
    row_tokens: int,
    tokenizer: Tokenizer,
    unit_files: Sequence[Path],
    work: Path,
    tally: _Tally,
) -> SplitFacts:
    """Pack one split into work/<split>. Raises ValueError if it has no full row."""
    remove(work / split)
    writer = ShardWriter(work / split, row_tokens=row_tokens, vocab_size=tokenizer.vocab_size)
    unwritten: deque[str] = deque()  # names of documents read and not yet begun in a full row
    documents = text_bytes = tail = 0
    for row in pack(_documents(unit_files, split, unwritten), row_tokens):
        if len(row.tokens) < row_tokens:
            tail = len(row.tokens)
            break
        writer.write(row.tokens, row.document_starts)
        text_bytes += int(tokenizer.token_bytes[row.tokens].sum())
        for _ in range(len(row.document_starts) - row.continued):
            unwritten.popleft()
            documents += 1
    if writer.rows == 0:
        raise ValueError(
            f"the {split} split has no full row: got {tail} tokens; expected at least row-tokens = "
            f"{row_tokens}; lower --row-tokens or give this split more text"
        )
    for name in unwritten:
        tally.skip(TAIL_REASON, name)
    return SplitFacts(
        rows=writer.rows,
        tokens=writer.rows * row_tokens,
        documents=documents,
        bytes=text_bytes,
        dropped_tokens={"tail": tail},
        index_sha256=writer.finish(),
    )


def _documents(unit_files: Sequence[Path], split: str, names: deque[str]) -> Iterator[np.ndarray]:
    """Token arrays of the split in corpus order; names gets the name of each one handed out."""
    for path in unit_files:
        with np.load(path, allow_pickle=False) as arrays:
            tokens, lengths = arrays[f"{split}_tokens"], arrays[f"{split}_lengths"]
            record = json.loads(arrays["record"].tobytes())
        ends = np.cumsum(lengths)
        for name, start, end in zip(record["names"][split], ends - lengths, ends, strict=True):
            names.append(name)
            yield tokens[start:end]


def _load_record(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return json.loads(arrays["record"].tobytes())


def _fingerprint(files: Sequence[Segment]) -> str | None:
    """Of the names and sizes; contents are not read for it."""
    if not files:
        return None
    listing = json.dumps([[file.name, file.file_bytes] for file in files])
    return hashlib.sha256(listing.encode()).hexdigest()


def _refuse_overlap(train: Sequence[Segment], validation: Sequence[Segment]) -> None:
    paths = {str(Path(file.path).resolve()) for file in train}
    for file in validation:
        if str(Path(file.path).resolve()) in paths:
            raise ValueError(
                f"a file is in both splits: got {file.path} in the inputs and in --validation; "
                "expected separate files; move it, or use --validation-fraction"
            )
