"""Which folders are complete checkpoints, and how a folder becomes one.

A checkpoint is a folder `step-00000100` with a `checkpoint.json`. That manifest is written last and
atomically, and lists every other file with its size and hash: a folder without it does not exist
as a checkpoint, whatever else is in it. Nothing here opens weights; models/weights.py does.

    RUN/checkpoints/step-00000100/checkpoint.json
    {"format_version": 1, <facts>, "files": {"engine/...": {"bytes": 1234, "sha256": "..."}, ...}}
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

FORMAT_VERSION = 1
MANIFEST_NAME = "checkpoint.json"
CHECKPOINTS_FOLDER = "checkpoints"
TOKENIZER = "tokenizer.model"
"""Always compared by hash where hashes are: another one is refused with both."""
MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    TOKENIZER,
)
"""What makes up the model, as patterns of file names."""

_STEP_NAME = re.compile(r"step-(\d+)")
_TEMPORARY_SUFFIX = ".tmp"
_RESERVED_FACTS = frozenset({"format_version", "files"})

log = logging.getLogger(__name__)


def step_folder(run_dir: Path, step: int) -> Path:
    """RUN/checkpoints/step-00000100 for step 100."""
    return Path(run_dir) / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` so that `path` holds either what it held before or all of `content`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{_TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk shall not be filled by what failed
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(step_dir: Path, facts: Mapping[str, Any]) -> None:
    """Completes the checkpoint `step_dir`: lists every file with size and hash, and `facts`.

    Call it after everything else is written; writing any listed file again makes the checkpoint
    invalid.

    Args:
        facts: JSON values (step, tokens, sample position, configuration, ...).

    Raises:
        ValueError: a fact is named "format_version" or "files", or the folder holds no file.
    """
    step_dir = Path(step_dir)
    if reserved := _RESERVED_FACTS & facts.keys():
        raise ValueError(
            f"checkpoint facts may not be named {sorted(reserved)}: the manifest sets them"
        )
    names = [
        path.relative_to(step_dir).as_posix()
        for path in sorted(step_dir.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME and path.suffix != _TEMPORARY_SUFFIX
    ]
    if not names:
        raise ValueError(f"no files to list in checkpoint {step_dir}; write the weights first")
    files = {
        name: {"bytes": (step_dir / name).stat().st_size, "sha256": file_sha256(step_dir / name)}
        for name in names
    }
    for name in names:
        _sync_file(step_dir / name)
    manifest = {"format_version": FORMAT_VERSION, **facts, "files": files}
    write_atomically(step_dir / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())


def read_manifest(step_dir: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, its own form checked but not the files it lists.

    Raises:
        FileNotFoundError: there is none, so the folder is not a checkpoint.
        ValueError: it is not one that this program writes.
    """
    path = Path(step_dir) / MANIFEST_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{step_dir} has no {MANIFEST_NAME}, so it was never completed")
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} has no table of files")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {manifest.get('format_version')!r}; "
            f"this version reads {FORMAT_VERSION}"
        )
    for name, entry in manifest["files"].items():
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] == "/":
            raise ValueError(f"{path} lists a file outside its folder: {name!r}")
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("bytes"), int)
            or not isinstance(entry.get("sha256"), str)
        ):
            raise ValueError(f"{path} lists {name!r} without bytes and sha256")
    return manifest


def verify(step_dir: Path, hashes: bool = True, only: Collection[str] | None = None) -> list[str]:
    """Everything that is wrong with a checkpoint; [] means complete.

    Args:
        hashes: also read the files and compare their hashes; False compares sizes only.
        only: hash files of these names or patterns alone (sizes are compared for all).
    """
    step_dir = Path(step_dir)
    try:
        manifest = read_manifest(step_dir)
    except (OSError, ValueError) as error:
        return [str(error)]
    problems = []
    for name, entry in manifest["files"].items():
        path = step_dir / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry["bytes"] and not (hashes and name == TOKENIZER):
            problems.append(f"{name} has {size} bytes, expected {entry['bytes']}")
        elif (
            hashes
            and (only is None or any(fnmatch(name, pattern) for pattern in only))
            and (sha256 := file_sha256(path)) != entry["sha256"]
        ):
            problems.append(
                f"{name} does not have the recorded sha256: got {sha256}; expected "
                f"{entry['sha256']}"
            )
    return problems


def step_folders(run_dir: Path) -> list[Path]:
    """Every step folder of a run, complete or not, newest step first."""
    folder = Path(run_dir) / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    found = [
        (int(match.group(1)), path)
        for path in folder.iterdir()
        if path.is_dir() and (match := _STEP_NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def newest_complete(
    run_dir: Path, hashes: bool = True, only: Collection[str] | None = None
) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and why newer ones were passed over.

    Args:
        hashes, only: as for `verify`.

    Returns:
        (step folder or None, ["step-00000200 passed over: <reason>", ...])
    """
    passed_over: list[str] = []
    for step_dir in step_folders(run_dir):
        problems = verify(step_dir, hashes, only)
        if not problems:
            return step_dir, passed_over
        passed_over.append(f"{step_dir.name} passed over: {'; '.join(problems)}")
    return None, passed_over


def resolve(path: Path | str) -> Path:
    """The model directory that `path` means.

    Args:
        path: a run (its newest complete checkpoint is taken, newer incomplete ones are logged), a
            step folder, or a plain model directory. Hashes are checked of the files that make up
            the model; of the training engine's files only sizes.

    Raises:
        FileNotFoundError: there is no such folder, or nothing complete in it.
        ValueError: a step folder was named that is incomplete or damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"no checkpoint: {path} is not a folder; "
            "expected a run, a step folder or a model directory"
        )
    if (path / MANIFEST_NAME).exists() or _STEP_NAME.fullmatch(path.name):
        if problems := verify(path, only=MODEL_FILES):
            raise ValueError(f"checkpoint {path} is not complete: {'; '.join(problems)}")
        return path
    weights = ("model.safetensors", "model.safetensors.index.json")
    if (path / "config.json").is_file() and any((path / name).is_file() for name in weights):
        return path
    run_dir = path.parent if path.name == CHECKPOINTS_FOLDER else path
    newest, passed_over = newest_complete(run_dir, only=MODEL_FILES)
    if newest is None:
        found = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise FileNotFoundError(
            f"no complete checkpoint in {path}{found}; "
            "expected a run, a step folder or a model directory"
        )
    for reason in passed_over:
        log.warning("%s", reason)
    return newest


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
