"""Inputs to work units, in an order and under names that never change.

    INPUT            files
    a file           itself
    a folder         every file below it, in sorted order; hidden ones are passed over
    a glob           every file that matches, sorted; "**" crosses folders
    PROTOCOL://...   the same three, through fsspec
    hf:NAME          a data set of the Hugging Face hub (data_prep/huggingface.py)
    -                JSON lines from standard input, kept in a file until the data set is made
    stdlib           the source of Python's own standard library (data_prep/stdlib_corpus.py)

A document is named by its path from the input on, with "@" and the byte or row it begins at where
a file holds many: "corpus/a/b.txt", "corpus/c.jsonl@1234"; or by its id where the corpus has one.

Work is handed out in units: runs of documents of about UNIT_BYTES, cut by the corpus alone and not
by the number of workers. A large JSONL file is cut into byte ranges; a line belongs to the range
that its first byte is in. Parquet is cut between row groups. A compressed file stays whole.
"""

from __future__ import annotations

import glob
import hashlib
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from data_prep import huggingface
from data_prep.compression import UNREADABLE, is_compressed, is_remote
from data_prep.formats import (
    Document,
    Reading,
    Segment,
    Skipped,
    kind_of,
    parquet_groups,
    read_segment,
)
from data_prep.stdlib_corpus import STDLIB_INPUT, stdlib_files

UNIT_BYTES = 4 << 20
PLAIN = Reading()
STDIN_INPUT = "-"
GLOB_CHARACTERS = "*?["


@dataclass(frozen=True)
class Unit:
    """Segments that one task reads."""

    segments: tuple[Segment, ...]
    reading: Reading = Reading()

    @property
    def size(self) -> int:
        """Bytes to read, on disk."""
        return sum(segment.size for segment in self.segments)


def list_files(inputs: Sequence[str], include: Sequence[str] = ()) -> list[Segment]:
    """Every file of the inputs once, in input order and sorted inside a folder.

    `include`: shell patterns for file names inside folders and globs ("*.py"); none = all files.
    Raises FileNotFoundError or ValueError if an input does not exist or nothing is found.
    """
    found: dict[str, Segment] = {}
    for typed in inputs:
        for segment in _expand(typed, include):
            key = segment.path if is_remote(segment.path) else os.path.realpath(segment.path)
            found.setdefault(key, segment)
    if not found:
        patterns = f" that match {', '.join(include)}" if include else ""
        raise ValueError(
            f"no document in the inputs: got {', '.join(inputs)}; expected text, JSONL or parquet "
            f"files{patterns}; check the paths"
        )
    return list(found.values())


def spool_stdin(path: Path) -> Segment:
    """Copy standard input, JSON lines, to `path`; one content is one version.

    Raises ValueError if nothing but blanks comes.
    """
    digest = hashlib.sha256()
    size = 0
    blank = True
    with path.open("wb") as file:
        while block := sys.stdin.buffer.read(1 << 20):
            file.write(block)
            digest.update(block)
            size += len(block)
            blank = blank and not block.strip()
    if blank:
        raise ValueError(
            f"no document in standard input: got {size} bytes, blanks only; expected JSON lines"
        )
    return Segment("stdin", str(path), "jsonl", size, f"sha256 {digest.hexdigest()}", size=size)


def make_units(files: Iterable[Segment], unit_bytes: int, reading: Reading = PLAIN) -> list[Unit]:
    """Cut the files into units of about `unit_bytes`, keeping their order."""
    units: list[Unit] = []
    current: list[Segment] = []
    current_bytes = 0
    for file in files:
        for segment in _cut(file, unit_bytes):
            if current and current_bytes + segment.size > unit_bytes:
                units.append(Unit(tuple(current), reading))
                current, current_bytes = [], 0
            current.append(segment)
            current_bytes += segment.size
    if current:
        units.append(Unit(tuple(current), reading))
    return units


def sample_units(units: Sequence[Unit], max_bytes: int, seed: int) -> list[Unit]:
    """All units, or a random choice of about `max_bytes` where there is more; in their order."""
    order = list(range(len(units)))
    random.Random(seed).shuffle(order)
    chosen, size = [], 0
    for index in order:
        if size >= max_bytes:
            break
        chosen.append(index)
        size += units[index].size
    return [units[index] for index in sorted(chosen)]


def read_documents(unit: Unit) -> Iterator[Document | Skipped]:
    """The documents of a unit in order; trouble with one never hides another."""
    for segment in unit.segments:
        yield from read_segment(segment, unit.reading)


def name_key(name: str, seed: int) -> int:
    """A number in [0, 2^64) fixed by a document's name and the seed."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def held_out(name: str, fraction: float, seed: int) -> bool:
    """Whether the document of this name is for validation: a coin fixed by name and seed."""
    return name_key(name, seed) < fraction * 2**64


def _expand(typed: str, include: Sequence[str]) -> Iterator[Segment]:
    """Every file of one input."""
    if typed == STDLIB_INPUT:
        for name, path in stdlib_files():
            yield _local(name, path)
    elif huggingface.is_huggingface(typed):
        data = huggingface.load(typed)
        name = typed.removeprefix(huggingface.PREFIX)
        size = data.data.nbytes
        yield Segment(
            name, typed, "huggingface", size, data._fingerprint, 0, data.num_rows, size=size
        )
    elif is_remote(typed):
        yield from _expand_remote(typed, include)
    else:
        yield from _expand_local(typed, include)


def _expand_local(typed: str, include: Sequence[str]) -> Iterator[Segment]:
    root = Path(typed)
    if root.is_file():
        yield _local(root.name, root)
    elif root.is_dir():
        prefix = root.resolve().name
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if _wanted(name, include):
                    path = Path(folder, name)
                    yield _local(f"{prefix}/{path.relative_to(root).as_posix()}", path)
    elif root.exists():
        raise ValueError(f"input {typed} is no file: expected a regular file or a folder")
    elif any(character in typed for character in GLOB_CHARACTERS):
        paths = [Path(p) for p in sorted(glob.glob(typed, recursive=True)) if os.path.isfile(p)]
        if not paths:
            raise FileNotFoundError(f"input {typed} matches no file: check the pattern")
        fixed = Path(*_before_glob(root.parts))
        for path in paths:
            if _wanted(path.name, include):
                yield _local(f"{fixed.resolve().name}/{path.relative_to(fixed).as_posix()}", path)
    else:
        raise FileNotFoundError(
            f"input {typed} does not exist: expected a text, JSONL or parquet file, a folder, a "
            f'glob, a URL, hf:NAME, "{STDIN_INPUT}" or "{STDLIB_INPUT}"; check the path'
        )


def _expand_remote(typed: str, include: Sequence[str]) -> Iterator[Segment]:
    try:
        fs, root = fsspec.core.url_to_fs(typed)
        if any(character in root for character in GLOB_CHARACTERS):
            found = fs.glob(root, detail=True)
            fixed = str(PurePosixPath(*_before_glob(PurePosixPath(root).parts)))
        else:
            found = fs.find(root, detail=True)
            fixed = str(PurePosixPath(root))
    except ImportError as error:
        raise ValueError(
            f"input {typed} needs another package: {error}; install it, fsspec uses it"
        ) from None
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"input {typed} cannot be listed: {error}") from None
    files = {path: info for path, info in sorted(found.items()) if info.get("type") != "directory"}
    if not files:
        raise FileNotFoundError(f"input {typed} does not exist or holds no file: check the URL")
    for path, info in files.items():
        inside = PurePosixPath(path).relative_to(fixed).as_posix() if path != fixed else ""
        hidden = any(part.startswith(".") for part in inside.split("/"))
        if inside and inside != "." and (hidden or not _wanted(PurePosixPath(path).name, include)):
            continue
        name = PurePosixPath(fixed).name + (f"/{inside}" if inside not in ("", ".") else "")
        url = fs.unstrip_protocol(path)
        size = int(info.get("size") or 0)
        yield Segment(name, url, kind_of(path), size, _remote_version(info), size=size)


def _remote_version(info: dict[str, Any]) -> str:
    """What the store says that changes with the content."""
    keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
    return next((str(info[key]) for key in keys if info.get(key)), "")


def _before_glob(parts: Sequence[str]) -> list[str]:
    """The leading parts of a pattern that are no pattern."""
    fixed: list[str] = []
    for part in parts[:-1]:
        if any(character in part for character in GLOB_CHARACTERS):
            break
        fixed.append(part)
    return fixed


def _wanted(name: str, include: Sequence[str]) -> bool:
    if name.startswith("."):
        return False
    return not include or any(fnmatch(name, pattern) for pattern in include)


def _local(name: str, path: Path) -> Segment:
    try:
        stat = path.stat()
        size, version = stat.st_size, str(stat.st_mtime_ns)
    except OSError:  # a dangling link: reading it will say so and count it
        size, version = 0, ""
    return Segment(name, str(path), kind_of(str(path)), size, version, size=size)


def _cut(file: Segment, unit_bytes: int) -> Iterator[Segment]:
    if file.file_bytes <= unit_bytes or (file.kind != "huggingface" and is_compressed(file.path)):
        yield file
    elif file.kind == "jsonl":
        for start in range(0, file.file_bytes, unit_bytes):
            end = min(start + unit_bytes, file.file_bytes)
            yield replace(file, start=start, end=end, size=end - start)
    elif file.kind == "parquet":
        yield from _cut_parquet(file, unit_bytes)
    elif file.kind == "huggingface":
        assert file.end is not None
        rows = max(1, file.end * unit_bytes // file.file_bytes)
        for start in range(0, file.end, rows):
            end = min(start + rows, file.end)
            size = file.file_bytes * (end - start) // file.end
            yield replace(file, start=start, end=end, size=size)
    else:
        yield file


def _cut_parquet(file: Segment, unit_bytes: int) -> Iterator[Segment]:
    try:
        groups = parquet_groups(file.path)
    except UNREADABLE:  # reading it will say so and count it
        yield file
        return
    start = size = 0
    for group, group_bytes in enumerate(groups):
        size += group_bytes
        if size >= unit_bytes or group == len(groups) - 1:
            share = file.file_bytes * size // max(1, sum(groups))
            yield replace(file, start=start, end=group + 1, size=share)
            start, size = group + 1, 0
