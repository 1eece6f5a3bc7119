"""Reading UTF-8 text files, plain or .xz."""

from __future__ import annotations

import lzma
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """The unpacked bytes of a file; ValueError where it is not there, is empty or is a damaged
    .xz."""
    if not path.is_file():
        raise ValueError(f"text file not found: got {path}; expected a UTF-8 file, plain or .xz")
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except lzma.LZMAError as error:
        raise ValueError(f"cannot unpack {path}: got {error}; expected an .xz file") from error
    if not data:
        raise ValueError(f"text file is empty: got {path}; expected at least one byte")
    return data


def read_text(path: Path) -> str:
    """The text of a file with its line ends as they are."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: got {error.reason} at byte {error.start}; expected UTF-8 text; "
            "convert it first"
        ) from error
