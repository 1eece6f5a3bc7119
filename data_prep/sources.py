"""Files and folders to documents, in an order and under names that never change.

    INPUT            documents
    a folder         every file below it, in sorted order; hidden files and folders are passed over
    *.jsonl          one per line: the string field "text" of a JSON object
    any other file   one: its whole content, which must be UTF-8
    stdlib           the source of Python's own standard library (data_prep/stdlib_corpus.py)

A name ending in .gz, .xz or .bz2 is decompressed first. A document is named by its path from the
input on, with "@offset" of the line for JSONL: "corpus/a/b.txt", "corpus/c.jsonl@1234". What cannot
be read is skipped, and the reason counted, never fatal.

Work is handed out in units: runs of documents of about UNIT_BYTES, cut by the corpus alone and not
by the number of workers. A large JSONL file is cut into byte ranges; a line belongs to the range
that its first byte is in.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from data_prep.stdlib_corpus import STDLIB_INPUT, stdlib_files

UNIT_BYTES = 4 << 20
OPENERS: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """A named text; `text` is never empty and always valid Unicode."""

    name: str
    text: str


@dataclass(frozen=True)
class Skipped:
    """A document that was found and not read."""

    name: str
    reason: str


@dataclass(frozen=True)
class Segment:
    """A file, or the byte range [start, end) of an uncompressed JSONL file."""

    name: str
    path: str
    file_bytes: int
    mtime_ns: int
    start: int = 0
    end: int | None = None

    @property
    def size(self) -> int:
        """Bytes to read, on disk."""
        return (self.file_bytes if self.end is None else self.end) - self.start


Unit = tuple[Segment, ...]


def list_files(inputs: Sequence[str], include: Sequence[str] = ()) -> list[Segment]:
    """Every file of the inputs once, in input order and sorted inside a folder.

    `include`: shell patterns for file names inside folders ("*.py"); none = all files.
    Raises FileNotFoundError or ValueError if an input does not exist or nothing is found.
    """
    found: dict[Path, Segment] = {}
    for typed in inputs:
        for name, path in _expand(typed, include):
            resolved = path.resolve()
            if resolved not in found:
                found[resolved] = _segment(name, path)
    if not found:
        patterns = f" that match {', '.join(include)}" if include else ""
        raise ValueError(
            f"no document in the inputs: got {', '.join(inputs)}; expected text or JSONL files"
            f"{patterns}; check the paths"
        )
    return list(found.values())


def make_units(files: Iterable[Segment], unit_bytes: int) -> list[Unit]:
    """Cut the files into units of about `unit_bytes`, keeping their order."""
    units: list[Unit] = []
    current: list[Segment] = []
    current_bytes = 0
    for file in files:
        for segment in _ranges(file, unit_bytes):
            if current and current_bytes + segment.size > unit_bytes:
                units.append(tuple(current))
                current, current_bytes = [], 0
            current.append(segment)
            current_bytes += segment.size
    if current:
        units.append(tuple(current))
    return units


def sample_units(units: list[Unit], max_bytes: int, seed: int) -> list[Unit]:
    """All units, or a random choice of about `max_bytes` where there is more; in their order."""
    order = list(range(len(units)))
    random.Random(seed).shuffle(order)
    chosen, size = [], 0
    for index in order:
        if size >= max_bytes:
            break
        chosen.append(index)
        size += unit_size(units[index])
    return [units[index] for index in sorted(chosen)]


def unit_size(unit: Unit) -> int:
    """Bytes to read, on disk."""
    return sum(segment.size for segment in unit)


def read_documents(unit: Unit) -> Iterator[Document | Skipped]:
    """The documents of a unit in order; trouble with one never hides another."""
    for segment in unit:
        try:
            if _is_jsonl(segment.path):
                yield from _read_jsonl(segment)
            else:
                with _open(segment.path) as file:
                    yield _document(segment.name, file.read())
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            yield Skipped(segment.name, f"unreadable: {_brief(error)}")


def held_out(name: str, fraction: float, seed: int) -> bool:
    """Whether the document of this name is for validation: a coin fixed by name and seed."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _expand(typed: str, include: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file of one input."""
    if typed == STDLIB_INPUT:
        yield from stdlib_files()
        return
    root = Path(typed)
    if root.is_file():
        yield root.name, root
    elif root.is_dir():
        prefix = root.resolve().name
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if name.startswith("."):
                    continue
                if include and not any(fnmatch(name, pattern) for pattern in include):
                    continue
                path = Path(folder, name)
                yield f"{prefix}/{path.relative_to(root).as_posix()}", path
    elif root.exists():
        raise ValueError(f"input {typed} is no file: expected a regular file or a folder")
    else:
        raise FileNotFoundError(
            f"input {typed} does not exist: expected a text file, a JSONL file, a folder or "
            f'"{STDLIB_INPUT}"; check the path'
        )


def _segment(name: str, path: Path) -> Segment:
    try:
        stat = path.stat()
    except OSError:  # a dangling link: reading it will say so and count it
        return Segment(name, str(path), 0, 0)
    return Segment(name, str(path), stat.st_size, stat.st_mtime_ns)


def _ranges(file: Segment, unit_bytes: int) -> Iterator[Segment]:
    if not file.path.endswith(JSONL_SUFFIXES) or file.file_bytes <= unit_bytes:
        yield file
        return
    for start in range(0, file.file_bytes, unit_bytes):
        end = min(start + unit_bytes, file.file_bytes)
        yield Segment(file.name, file.path, file.file_bytes, file.mtime_ns, start, end)


def _is_jsonl(path: str) -> bool:
    stem, suffix = os.path.splitext(path)
    return (stem if suffix in OPENERS else path).endswith(JSONL_SUFFIXES)


def _open(path: str) -> IO[bytes]:
    if not os.path.isfile(path):  # a named pipe would block for ever
        raise FileNotFoundError("no such regular file")
    opener = OPENERS.get(os.path.splitext(path)[1])
    return opener(path) if opener else open(path, "rb")


def _read_jsonl(segment: Segment) -> Iterator[Document | Skipped]:
    with _open(segment.path) as file:
        offset = segment.start
        if offset > 0:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1  # the rest of a line of the range before
        while segment.end is None or offset < segment.end:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield _jsonl_document(f"{segment.name}@{offset}", line)
            offset += len(line)


def _jsonl_document(name: str, line: bytes) -> Document | Skipped:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")
    except (ValueError, RecursionError):
        return Skipped(name, "not JSON")
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return Skipped(name, 'no string field "text"')
    try:
        return _document(name, text.encode("utf-8"))
    except UnicodeEncodeError:
        return Skipped(name, "lone surrogate in the text")


def _document(name: str, content: bytes) -> Document | Skipped:
    if not content:
        return Skipped(name, "empty")
    try:
        return Document(name, content.decode("utf-8"))
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")


def _brief(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
