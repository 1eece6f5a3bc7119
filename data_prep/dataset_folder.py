"""Makes a data set appear all at once, and tells finished, unfinished and foreign folders apart.

While it is made everything lies in DATASET/.building; the manifest, written last, makes it a data
set. A process that was killed leaves .building behind, which the same command picks up again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from data_prep.shards import Manifest, SettingValue, read_manifest

WORK_FOLDER = ".building"


def finished(dataset: Path, kind: str, settings: Mapping[str, SettingValue]) -> Manifest | None:
    """The manifest of the finished data set, or None if there is none yet.

    Raises ValueError if what is there is something else: another data set, or someone's files.
    """
    if not (dataset / "manifest.json").exists():
        _refuse_foreign(dataset)
        return None
    manifest = read_manifest(dataset)
    if manifest.kind != kind:
        raise ValueError(
            f"output {dataset} holds another data set: got kind {manifest.kind}; expected {kind}; "
            "choose another --output"
        )
    for name, value in settings.items():
        if manifest.settings.get(name) != value:
            raise ValueError(
                f"output {dataset} holds a data set made with other settings: {name} there is "
                f"{manifest.settings.get(name)}, asked for {value}; choose another --output or "
                "remove that folder"
            )
    shutil.rmtree(dataset / WORK_FOLDER, ignore_errors=True)  # killed while cleaning up
    return manifest


@contextmanager
def building(dataset: Path) -> Iterator[Path]:
    """Claim the folder for this process and yield its work folder, with what a killed run left.

    Raises ValueError if another process is at it.
    """
    work = dataset / WORK_FOLDER
    make_folder(work, dataset)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output {dataset} is being written by another process; wait for it or choose "
                "another --output"
            ) from None
        yield work


def make_folder(folder: Path, dataset: Path) -> None:
    """Make a folder that the data set needs; ValueError where none can be, but for a full disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"output {dataset} cannot be made: got {error.strerror}; expected a place where "
            "folders can be made; choose another --output"
        ) from None


def publish(dataset: Path, manifest: Manifest, tokenizer_model: bytes | None) -> None:
    """Move the splits out of the work folder, write the manifest, remove the work folder."""
    work = dataset / WORK_FOLDER
    for split in manifest.splits:
        remove(dataset / split)
        os.replace(work / split, dataset / split)
    if tokenizer_model is not None:
        write_atomically(dataset / "tokenizer.model", tokenizer_model)
    text = json.dumps(manifest.model_dump(), indent=2, sort_keys=True) + "\n"
    write_atomically(dataset / "manifest.json", text.encode())
    shutil.rmtree(work)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by a file that holds all of `content`, or leave it as it is."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk shall not be filled by what failed
        raise


def _refuse_foreign(dataset: Path) -> None:
    if dataset.exists() and not dataset.is_dir():
        raise ValueError(f"output {dataset} is a file: expected a folder; choose another --output")
    if dataset.is_dir() and any(dataset.iterdir()) and not (dataset / WORK_FOLDER).is_dir():
        raise ValueError(
            f"output {dataset} is not empty and no data set: expected a new or empty folder; "
            "choose another --output"
        )


def remove(path: Path) -> None:
    """Delete a file or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
