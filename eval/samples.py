"""What every sample of a task scored, on disk as it comes: an evaluation goes on where it was.

    <folder of results.json>/samples/<task>-<12 hex digits>.jsonl

The first line says what was measured, every other line is one sample:

    {"format_version": 1, "task": "niah", "version": 2, "settings": {...},
     "weights_sha256": "...", "tokenizer_sha256": "..."}
    {"key": "17", "values": {"accuracy": 100.0, "depth": 0.31, ...}}

The digits are those of a hash of the first line, weights left out, so a file is found again by what
it holds. How many samples were asked for is not part of it: more samples add to the file. A last
line that a killed program cut is dropped; samples of other weights are thrown away. Two programs
never write one file: the second is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from eval.progress import track

FORMAT_VERSION = 1
FOLDER_NAME = "samples"
Values = dict[str, Any]
Run = Callable[[list[int]], Iterator[Values]]
"""Scores the samples at these places and yields their values in that order."""


@dataclass
class SampleLog:
    """The samples of one measurement; in memory only where `file` is None."""

    done: dict[str, Values] = field(default_factory=dict)
    file: IO[bytes] | None = None

    def scored(self, keys: Sequence[str], run: Run, what: str) -> list[Values]:
        """The values of every key, in order; `run` is asked for those that are not there yet.

        Args:
            keys: what tells one sample from another, each once.
            run: called once, with the places in `keys` of the missing samples.
            what: names the work in the progress line.
        """
        missing = [place for place, key in enumerate(keys) if key not in self.done]
        if missing:
            found = zip(missing, run(missing), strict=True)
            for place, values in track(found, len(missing), what):
                self._add(keys[place], values)
        return [self.done[key] for key in keys]

    def _add(self, key: str, values: Values) -> None:
        line = json.dumps({"key": key, "values": values})
        # What is returned now and what a later run reads back are the same.
        self.done[key] = json.loads(line)["values"]
        if self.file is not None:
            with _naming(self.file.name):
                self.file.write(line.encode() + b"\n")
                self.file.flush()

    def close(self) -> None:
        """Ends the claim on the file."""
        if self.file is not None:
            with _naming(self.file.name), self.file:
                self.file.flush()
                os.fsync(self.file.fileno())


@dataclass(frozen=True)
class SampleStore:
    """Where the samples of one model go; nowhere but memory without a folder."""

    folder: Path | None = None
    weights_sha256: str | None = None
    tokenizer_sha256: str | None = None

    def open(self, task: str, version: int, settings: Mapping[str, Any]) -> SampleLog:
        """The log of a measurement with what earlier runs left in it.

        Raises:
            ValueError: another program writes it at this moment.
        """
        if self.folder is None:
            return SampleLog()
        header = {
            "format_version": FORMAT_VERSION,
            "task": task,
            "version": version,
            "settings": json.loads(json.dumps(settings)),
            "tokenizer_sha256": self.tokenizer_sha256,
        }
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
        header["weights_sha256"] = self.weights_sha256
        path = self.folder / FOLDER_NAME / f"{task.replace(':', '-')}-{digest[:12]}.jsonl"
        with _naming(path):
            return _open_file(path, header)


def read_samples(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Values]]]:
    """(first line, values by key) of every log beside a results file in `folder`."""
    for path in sorted((folder / FOLDER_NAME).glob("*.jsonl")):
        header, done, _ = _parse(path.read_bytes())
        if header is not None:
            yield header, done


@contextmanager
def _naming(path: Path | str) -> Iterator[None]:
    """The system's refusals as one line: those of a full disk do not name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def _open_file(path: Path, header: dict[str, Any]) -> SampleLog:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115 (the log keeps it, and with it the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"samples are being written by another program: got {path}; expected one evaluation of "
            "these at a time; wait for it, or give another --output"
        ) from None
    file.seek(0)
    found, done, end = _parse(file.read())
    if found != header:
        done, end = {}, 0
    file.truncate(end)
    if end == 0:
        file.write(json.dumps(header).encode() + b"\n")
        file.flush()
    return SampleLog(done, file)


def _parse(content: bytes) -> tuple[dict[str, Any] | None, dict[str, Values], int]:
    """(first line or None, values by key, bytes up to the end of the last whole line)."""
    end = content.rfind(b"\n") + 1
    lines = content[:end].splitlines()
    done: dict[str, Values] = {}
    try:
        header = json.loads(lines[0])
        for line in lines[1:]:
            entry = json.loads(line)
            done[entry["key"]] = entry["values"]
    except (IndexError, ValueError, KeyError, TypeError):
        return None, {}, 0
    if not isinstance(header, dict) or "task" not in header:
        return None, {}, 0
    return header, done, end
