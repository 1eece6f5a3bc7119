"""Files as streams of bytes: decompressed by their suffix, local or remote."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import fsspec
import zstandard

BLOCK_BYTES = 1 << 20
ZSTD_INPUT_BYTES = 8 << 10  # a block of it, unpacked, is at most some 100 MB
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)


def is_compressed(path: str) -> bool:
    """Whether the name says so; then only the whole of the file can be read."""
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
