"""What both kinds of sweep share: reading their YAML file, and the folder that holds their runs."""

import fcntl
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pretrain.config import read_yaml
from pretrain.errors import Refused

LOCK_NAME, RUNS_FOLDER, TABLE_NAME = ".lock", "runs", "table.json"
Config = TypeVar("Config", bound=BaseModel)


def read_tree(path: Path) -> dict[str, Any]:
    """The settings of a sweep's YAML file as they stand there; errors are those of read_yaml."""
    return read_yaml(path, "sweep", "sweep_dir, task or config, grid or arms, ...")


def read(path: Path, kind: type[Config], sweep_dir: Path | None = None) -> Config:
    """A sweep's YAML file as the config `kind`.

    Args:
        sweep_dir: replaces the file's.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, or a setting is wrong; one line for each fault.
    """
    tree = read_tree(path)
    if sweep_dir is not None:
        tree = {**tree, "sweep_dir": str(sweep_dir)}
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ValueError("\n".join(dict.fromkeys(_lines(error)))) from None


def _lines(error: ValidationError) -> list[str]:
    lines = []
    places = [fault["loc"] for fault in error.errors()]
    for fault in error.errors():
        depth = len(fault["loc"])
        if any(place[:depth] == fault["loc"] and len(place) > depth for place in places):
            continue  # it follows from a fault inside
        name = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            lines.append(f"unknown setting: got {name}; expected one of the sweep's")
        elif fault["type"] == "missing":
            lines.append(f"setting is missing: expected {name}")
        elif fault["type"] == "value_error":
            lines.append(message if not name else f"{name}: {message}")
        else:
            rule = message.replace("Input should be", "expected")
            lines.append(f"{name} is wrong: got {fault['input']!r}; {rule}")
    return lines


def claim(sweep_dir: Path) -> int:
    """The folder for this process until it ends; a file descriptor, whose closing lets go of it.

    Raises:
        Refused: it holds something else, cannot be written, or another process has it.
    """
    if sweep_dir.is_dir() and _is_foreign(sweep_dir):
        raise Refused(
            f"sweep_dir holds files of something else: got {sweep_dir}; expected a sweep of this "
            "program or an empty folder; choose another sweep_dir"
        )
    try:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(sweep_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise Refused(
            f"sweep_dir cannot be written: got {sweep_dir}: {error.strerror}; expected a folder "
            "that you may write to; choose another one"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Refused(
            f"sweep_dir is in use: got {sweep_dir}, which another sweep writes; wait for it or "
            "choose another one"
        ) from None
    return lock


def _is_foreign(folder: Path) -> bool:
    """Whether a folder holds something, but not a sweep."""
    names = {path.name for path in folder.iterdir()}
    ours = RUNS_FOLDER in names and bool(names & {LOCK_NAME, TABLE_NAME})
    return not ours and not names <= {LOCK_NAME}
