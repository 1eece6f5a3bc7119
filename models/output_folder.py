"""A folder that appears whole or not at all, and knows what it was made from.

Everything is written into a hidden neighbour, `.NAME.partial`; a record (`export.json`: what was
asked for, from which weights, every file with size and hash) is written last, then the folder gets
its name in one rename. A killed program leaves only the neighbour, which the next attempt empties.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.checkpoint_directory import file_sha256, sync_folder, write_atomically

RECORD_NAME = "export.json"
FORMAT_VERSION = 1


def is_complete(output: Path, made_from: Mapping[str, Any]) -> bool:
    """Whether `output` is already what would be made: True; False where the name is free.

    Raises:
        ValueError: the folder holds something else, is made from other weights or settings, or is
            damaged. It is left as it is.
    """
    if not output.exists():
        return False
    if not output.is_dir():
        raise ValueError(f"output is not a folder: got {output}; expected a free name")
    if not any(output.iterdir()):
        return False
    record = read_record(output)
    if record is None:
        raise ValueError(
            f"output holds files of something else: got {output}; expected a free name or the "
            "result of the same command; choose another name"
        )
    found = record.get("made_from")
    if found != made_from:
        raise ValueError(
            f"output is the result of another command ({_difference(found, made_from)}): got "
            f"{output}; remove it or choose another name"
        )
    for name, entry in record["files"].items():
        path = output / name
        if not path.is_file() or file_sha256(path) != entry["sha256"]:
            raise ValueError(
                f"output is damaged: {path} is missing or changed since it was written; remove "
                "the folder or choose another name"
            )
    return True


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder made here; None where there is none.

    Raises:
        ValueError: it is damaged or of another version.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_bytes())
        version = record["format_version"]
        well_formed = isinstance(record["files"], dict)
    except (ValueError, KeyError, TypeError):
        version, well_formed = None, False
    if version != FORMAT_VERSION or not well_formed:
        raise ValueError(
            f"{path} has format_version {version!r}; this version reads {FORMAT_VERSION}"
        )
    return record


@contextmanager
def new_folder(output: Path, made_from: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to write into, which becomes `output` where the block ends without an error.

    Args:
        output: a free name or an empty folder (see `is_complete`).
        made_from: JSON values: what decides the content.

    Yields:
        The folder to write into. After an error it is removed.

    Raises:
        ValueError: another process is writing this output.
    """
    partial = output.with_name(f".{output.name}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        _take(lock, partial, output)
        _empty(partial)
        try:
            yield partial
            _complete(partial, made_from)
            os.replace(partial, output)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(output.parent)
    finally:
        os.close(lock)


def _take(lock: int, partial: Path, output: Path) -> None:
    """Locks the open folder; it ends with the process, however that ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, another process may have finished and renamed it.
        ours = os.stat(partial).st_ino == os.fstat(lock).st_ino
    except (BlockingIOError, FileNotFoundError):
        ours = False
    if not ours:
        raise ValueError(f"output is being written by another process: got {output}; wait for it")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _complete(folder: Path, made_from: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    record = {"format_version": FORMAT_VERSION, "made_from": made_from, "files": files}
    write_atomically(folder / RECORD_NAME, json.dumps(record, indent=1).encode())


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(found, dict):
        return "its record is damaged"
    different = [key for key in wanted if found.get(key) != wanted[key]]
    return f"other {', '.join(different or sorted(found.keys() - wanted.keys()))}"
