"""Files to documents: text, JSON lines and parquet, plain or compressed, local or remote.

    *.jsonl, *.ndjson   one document a line: a string field of a JSON object
    *.parquet           one document a row: a string column
    any other file      one document: its whole content, which must be UTF-8

A name ending in .gz, .zst, .xz or .bz2 is decompressed first. What cannot be read is skipped, and
the reason counted, never fatal. Text is taken byte for byte, ends of lines included. A document
longer than LONG_BYTES comes in parts, so that memory does not grow with it.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal

import fsspec
import zstandard

from data_prep.long_json import LongObject

Kind = Literal["text", "jsonl", "parquet", "huggingface"]
LONG_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20
PARQUET_BATCH_ROWS = 64
ZSTD_INPUT_BYTES = 8 << 10  # a block of it, unpacked, is at most some 100 MB
JSONL_SUFFIXES = (".jsonl", ".ndjson")
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)


@dataclass
class Document:
    """A named text in parts, never empty, always valid Unicode.

    The parts of a long document are read when they are asked for, once, and raise Unreadable where
    it turns out to be damaged; its name is final when all of them have been read.
    """

    name: str
    parts: Iterable[str]

    @property
    def text(self) -> str:
        """The whole text; for documents that fit."""
        return "".join(self.parts)


@dataclass(frozen=True)
class Skipped:
    """A document that was found and not read."""

    name: str
    reason: str


class Unreadable(ValueError):
    """A long document is damaged behind its beginning; the message is the reason to skip it."""


@dataclass(frozen=True)
class Segment:
    """A file, or the part [start, end) of one: bytes of JSON lines, row groups of a parquet file,
    rows of a Hugging Face data set.

    `version` tells this content from a later one under the same name.
    """

    name: str
    path: str
    kind: Kind
    file_bytes: int
    version: str
    start: int = 0
    end: int | None = None
    size: int = 0
    """Bytes to read, about, on disk."""


@dataclass(frozen=True)
class Reading:
    """Where a record keeps its text, and its name if it has one."""

    text_field: str = "text"
    id_field: str | None = None


def kind_of(path: str) -> Kind:
    """By the suffix, that of a compression apart."""
    stem, suffix = os.path.splitext(path)
    stem = stem if suffix in OPENERS else path
    if stem.endswith(JSONL_SUFFIXES):
        return "jsonl"
    return "parquet" if stem.endswith(".parquet") else "text"


def is_compressed(path: str) -> bool:
    """Whether only the whole of the file can be read."""
    return os.path.splitext(path)[1] in OPENERS


def is_remote(path: str) -> bool:
    """Whether fsspec reads it."""
    return "://" in path


@contextmanager
def open_binary(path: str) -> Iterator[IO[bytes]]:
    """The decompressed content. Raises one of UNREADABLE, now or later."""
    if not is_remote(path) and not os.path.isfile(path):  # a named pipe would block for ever
        raise FileNotFoundError("no such regular file")
    with fsspec.open(path, "rb") if is_remote(path) else open(path, "rb") as raw:
        opener = OPENERS.get(os.path.splitext(path)[1])
        if opener is None:
            yield raw
            return
        with opener(raw) as file:
            yield file


def read_segment(segment: Segment, reading: Reading) -> Iterator[Document | Skipped]:
    """The documents of a segment in order; trouble with one never hides another."""
    readers = {
        "text": _read_text,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "huggingface": _read_huggingface,
    }
    try:
        yield from readers[segment.kind](segment, reading)
    except UNREADABLE as error:
        yield Skipped(segment.name, f"unreadable: {_brief(error)}")


def parquet_groups(path: str) -> list[int]:
    """Bytes of each row group. Raises one of UNREADABLE."""
    import pyarrow
    import pyarrow.parquet

    with open_binary(path) as file:
        try:
            metadata = pyarrow.parquet.ParquetFile(file).metadata
        except pyarrow.ArrowException as error:
            raise OSError(_brief(error)) from None
        return [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]


def _read_text(segment: Segment, reading: Reading) -> Iterator[Document | Skipped]:
    with open_binary(segment.path) as file:
        first = file.read(LONG_BYTES)
        if len(first) < LONG_BYTES:
            yield _document(segment.name, first)
        else:
            yield Document(segment.name, _text_parts(first, file))


def _text_parts(first: bytes, file: IO[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    block = first
    try:
        while block:
            yield decoder.decode(block)
            block = file.read(BLOCK_BYTES)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except UNREADABLE as error:
        raise Unreadable(f"unreadable: {_brief(error)}") from None


def _read_jsonl(segment: Segment, reading: Reading) -> Iterator[Document | Skipped]:
    with open_binary(segment.path) as file:
        offset = segment.start
        if offset > 0:
            assert segment.end is not None  # only whole files have no end
            file.seek(offset - 1)
            skipped = _skip_line(file, segment.end - offset + 1)
            if skipped is None:
                return  # the range lies inside one line, which belongs to a range before
            offset += skipped - 1
        while segment.end is None or offset < segment.end:
            line = file.readline(LONG_BYTES)
            if not line:
                if offset == 0:
                    yield Skipped(segment.name, "empty")
                return
            name = f"{segment.name}@{offset}"
            offset += len(line)
            if len(line) < LONG_BYTES or line.endswith(b"\n"):
                if line.strip():
                    yield _jsonl_document(name, line, reading)
                continue
            rest = _RestOfLine(line, file)
            yield _long_document(name, rest, reading)
            offset += rest.drain()


class _RestOfLine:
    """The blocks of a long line, counted."""

    def __init__(self, first: bytes, file: IO[bytes]) -> None:
        self._first = first
        self._file = file
        self._count = 0
        self._blocks = self._read()

    def _read(self) -> Iterator[bytes]:
        yield self._first
        block = b""
        while not block.endswith(b"\n"):
            block = self._file.readline(BLOCK_BYTES)
            if not block:
                return
            self._count += len(block)
            yield block

    def __iter__(self) -> Iterator[bytes]:
        return self._blocks

    def drain(self) -> int:
        """Read what nobody asked for; the bytes after the first block."""
        for _ in self._blocks:
            pass
        return self._count


def _skip_line(file: IO[bytes], most: int) -> int | None:
    """Bytes to after the next end of line; None where the next `most` bytes hold none."""
    seen = 0
    while seen < most:
        block = file.readline(min(BLOCK_BYTES, most - seen))
        seen += len(block)
        if block.endswith(b"\n"):
            return seen
        if not block:
            return None
    return None


def _jsonl_document(name: str, line: bytes, reading: Reading) -> Document | Skipped:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")
    except (ValueError, RecursionError):
        return Skipped(name, "not JSON")
    if not isinstance(record, dict):
        return Skipped(name, f'no string field "{reading.text_field}"')
    return _record(
        name, record.get(reading.text_field), record.get(reading.id_field or ""), reading
    )


def _record(name: str, text: Any, identity: Any, reading: Reading) -> Document | Skipped:
    if reading.id_field is not None and isinstance(identity, str | int):
        name = _one_line(str(identity))
    if not isinstance(text, str):
        return Skipped(name, f'no string field "{reading.text_field}"')
    if not text:
        return Skipped(name, "empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Skipped(name, "lone surrogate in the text")
    return Document(name, (text,))


def _long_document(name: str, blocks: Iterable[bytes], reading: Reading) -> Document:
    line = LongObject(iter(blocks), reading.text_field, reading.id_field)

    def parts() -> Iterator[str]:
        length = 0
        try:
            for part in line.text_parts():
                part.encode("utf-8")
                length += len(part)
                yield part
        except UnicodeDecodeError:
            raise Unreadable("not UTF-8") from None
        except UnicodeEncodeError:
            raise Unreadable("lone surrogate in the text") from None
        except ValueError:
            raise Unreadable("not JSON") from None
        except UNREADABLE as error:
            raise Unreadable(f"unreadable: {_brief(error)}") from None
        if line.id is not None:
            document.name = _one_line(line.id)
        if not line.found:
            raise Unreadable(f'no string field "{reading.text_field}"')
        if not length:
            raise Unreadable("empty")

    document = Document(name, parts())
    return document


def _read_parquet(segment: Segment, reading: Reading) -> Iterator[Document | Skipped]:
    import pyarrow
    import pyarrow.parquet

    with open_binary(segment.path) as stream, tempfile.TemporaryFile() as spool:
        file = stream
        if is_compressed(segment.path):  # parquet is read from its end
            shutil.copyfileobj(stream, spool, BLOCK_BYTES)
            file = spool
        try:
            table = pyarrow.parquet.ParquetFile(file)
            groups = range(table.num_row_groups)[segment.start : segment.end]
            row = sum(table.metadata.row_group(n).num_rows for n in range(segment.start))
            wanted = [reading.text_field, *([reading.id_field] if reading.id_field else [])]
            columns = [name for name in wanted if name in table.schema_arrow.names]
            if reading.text_field not in columns:
                yield Skipped(segment.name, f'no column "{reading.text_field}"')
                return
            if table.metadata.num_rows == 0:
                yield Skipped(segment.name, "empty")
                return
            batches = table.iter_batches(PARQUET_BATCH_ROWS, list(groups), columns)
            for batch in batches:
                for n in range(batch.num_rows):
                    yield _arrow_document(f"{segment.name}@{row}", batch, n, reading)
                    row += 1
        except pyarrow.ArrowException as error:
            yield Skipped(segment.name, f"unreadable: {_brief(error)}")


def _arrow_document(name: str, batch: Any, row: int, reading: Reading) -> Document | Skipped:
    try:
        text = batch.column(reading.text_field)[row].as_py()
        named = reading.id_field is not None and reading.id_field in batch.schema.names
        identity = batch.column(reading.id_field)[row].as_py() if named else None
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")
    return _record(name, text, identity, reading)


def _read_huggingface(segment: Segment, reading: Reading) -> Iterator[Document | Skipped]:
    from data_prep.huggingface import load

    data = load(segment.path)
    if reading.text_field not in data.column_names:
        yield Skipped(segment.name, f'no column "{reading.text_field}"')
        return
    assert segment.end is not None
    for row in range(segment.start, segment.end):
        record = data[row]
        identity = record.get(reading.id_field or "")
        yield _record(f"{segment.name}@{row}", record[reading.text_field], identity, reading)


def _document(name: str, content: bytes) -> Document | Skipped:
    if not content:
        return Skipped(name, "empty")
    try:
        return Document(name, (content.decode("utf-8"),))
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")


def _one_line(name: str) -> str:
    """An id of the corpus as it may stand in a report."""
    return name.encode("unicode_escape").decode("ascii") if not name.isprintable() else name


def _brief(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


class _ZstdReader(io.RawIOBase):
    """Decompressed frames one after the other. zstandard's own stream takes a cut-off file for a
    complete one; here it is an EOFError.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._file.read(ZSTD_INPUT_BYTES)
            if not self._input:
                if self._begun:
                    raise EOFError("the compressed file ends before its end")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = self._frame.unused_data
            self._begun = not self._frame.eof
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_zstd(file: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_ZstdReader(file), BLOCK_BYTES)


OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".zst": _open_zstd,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
