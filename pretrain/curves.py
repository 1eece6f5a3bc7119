"""Curves without overlap: what a run wrote beyond the step that it resumes from is dropped."""

import io
import json
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from models.checkpoint_directory import write_atomically

EVENTS_SUFFIX = ".pretrain"
"""Ends the names of our event files; eval writes files of its own beside them."""


def drop_log_lines(path: Path, last_step: int) -> None:
    """Keeps the lines of log.jsonl up to `last_step`; the half line of a killed run goes too."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if step <= last_step and line.endswith(b"\n"):
            kept.append(line)
    write_atomically(path, b"".join(kept))


def drop_events(folder: Path, last_step: int) -> None:
    """Rewrites our TensorBoard files without the events beyond `last_step`."""
    for path in sorted(folder.glob(f"*{EVENTS_SUFFIX}")):
        records = list(RawEventFileLoader(str(path)).Load())  # stops at a half-written record
        kept = [record for record in records if Event.FromString(record).step <= last_step]
        if len(kept) == len(records):
            continue
        content = io.BytesIO()
        writer = RecordWriter(content)
        for record in kept:
            writer.write(record)
        write_atomically(path, content.getvalue())


def has_validation(log: Path, step: int) -> bool:
    """Whether log.jsonl holds the validation loss of a step."""
    if not log.is_file():
        return False
    for line in reversed(log.read_bytes().splitlines()):
        try:
            numbers = json.loads(line)
        except ValueError:
            continue
        if numbers.get("step") == step and "validation_loss" in numbers:
            return True
    return False
