"""Where results go: results.json, scalars in the run's TensorBoard, a table on the terminal.

    RUN/eval/step-00000100/results.json     for a run or a step folder inside one
    MODEL_DIR/eval/results.json             for a plain model directory

    {"format_version": 1, "model": {path, step, weights_sha256, tokenizer_sha256}, "results":
    [Result, ...]}

A later evaluation of the same weights adds to the file: a result with the same task, version,
metric and settings is replaced, all others stay. Scalars are a TensorBoard run of their own
(RUN/tensorboard/eval): TensorBoard stops reading an event file once a newer one appears beside it,
so training may go on writing to its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter

from eval.result import Result
from models.checkpoint_directory import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    file_sha256,
    read_manifest,
    write_atomically,
)
from models.tensor_files import INDEX_NAME, WEIGHTS_NAME

FORMAT_VERSION = 1
FILE_NAME = "results.json"
TAGGED = ("variant", "length", "pairs", "copied", "to")
"""Settings that tell a task's scalars apart."""


def run_of(model_dir: Path) -> Path | None:
    """The run that a step folder belongs to, or None for a plain model directory."""
    model_dir = model_dir.resolve()
    inside = model_dir.parent.name == CHECKPOINTS_FOLDER and (model_dir / MANIFEST_NAME).is_file()
    return model_dir.parent.parent if inside else None


def default_output(model_dir: Path) -> Path:
    """Where results of this model go when the user names no file."""
    run = run_of(model_dir)
    if run is None:
        return model_dir / "eval" / FILE_NAME
    return run / "eval" / model_dir.name / FILE_NAME


def scalars_folder(run: Path) -> Path:
    """The TensorBoard run of a run's evaluations."""
    return run / "tensorboard" / "eval"


def describe(model_dir: Path) -> dict[str, Any]:
    """Which model was evaluated: path, step (None outside a run), and what its bytes are.

    weights_sha256 is that of model.safetensors; of a sharded model, that of the text that
    `sha256sum` prints for the index's shards in the order of their names, "<sha256>  <name>" a
    line. Hashes that checkpoint.json records are taken from there: `resolve` has just checked them.

    Args:
        model_dir: a folder that `models.weights.load_model` opens.
    """
    in_run = (model_dir / MANIFEST_NAME).is_file()
    manifest = read_manifest(model_dir) if in_run else {"files": {}}

    def sha256(name: str) -> str:
        recorded = manifest["files"].get(name)
        return file_sha256(model_dir / name) if recorded is None else recorded["sha256"]

    index = model_dir / INDEX_NAME
    if index.is_file():
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        listing = "".join(f"{sha256(name)}  {name}\n" for name in shards)
        weights = hashlib.sha256(listing.encode()).hexdigest()
    else:
        weights = sha256(WEIGHTS_NAME)
    tokenizer = "tokenizer.model"
    return {
        "path": str(model_dir),
        "step": manifest.get("step"),
        "weights_sha256": weights,
        "tokenizer_sha256": sha256(tokenizer) if (model_dir / tokenizer).is_file() else None,
    }


def check_writable(folder: Path) -> None:
    """OSError where no file could be made in `folder`, which need not exist; makes nothing."""
    folder = folder.absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise OSError(f"cannot write in {folder}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OSError(f"cannot write in {folder}: no permission to write in {nearest}")


def earlier_results(output: Path, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Results that `output` already holds. ValueError where it is another file or of another model.

    Called before any work is done, so that hours of scoring never end at a file that may not be
    written.
    """
    if not output.exists():
        return []
    if not output.is_file():
        raise ValueError(
            f"output is not a file: got {output}; expected a new file or a results.json; give "
            "another --output"
        )
    try:
        content = json.loads(output.read_bytes())
        version = content["format_version"]
        weights = content["model"]["weights_sha256"]
        results = list(content["results"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"output exists and holds no results: got {output}; expected a new file or a "
            "results.json; give another --output"
        ) from None
    if version != FORMAT_VERSION or weights != model["weights_sha256"]:
        raise ValueError(
            f"output holds results of another model: got weights {weights} in {output}; "
            f"expected {model['weights_sha256']}; give another --output or move the file away"
        )
    return results


def write_results(output: Path, model: dict[str, Any], results: Sequence[Result]) -> None:
    """Adds `results` to what `output` holds, atomically, also beside other programs that do so.

    Raises:
        OSError: it cannot be written; the message names it.
        ValueError: it has come to hold something else meanwhile.
    """
    with _writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with _locked(output.parent):
            merged = {_key(entry): entry for entry in earlier_results(output, model)}
            merged |= {_key(entry): entry for entry in map(_as_json, results)}
            content = {
                "format_version": FORMAT_VERSION,
                "model": model,
                "results": list(merged.values()),
            }
            text = json.dumps(content, indent=1, allow_nan=False) + "\n"
            write_atomically(output, text.encode())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside, no other program of ours writes results in `folder`."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """The system's refusals as one line: those of a full disk do not name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def _as_json(result: Result) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(result)))


def _key(entry: dict[str, Any]) -> str:
    identity = [entry[name] for name in ("task", "version", "metric", "settings")]
    return json.dumps(identity, sort_keys=True)


def write_scalars(run: Path, step: int, results: Sequence[Result]) -> None:
    """One scalar per result at `step`, tag eval/<task>/<metric>, with the length or pairs where
    there are several.

    Checkpoints may be scored in any order, and again; a curve shows its points as they stand in the
    file. So all points are written anew, in the order of steps, each once.

    Raises:
        OSError: it cannot be written; the message names the folder.
    """
    folder = scalars_folder(run)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            old = sorted(folder.glob("events.out.tfevents.*"))
            points = dict(point for path in old for point in _points(path))
            points |= {(step, _tag(result)): result.value for result in results}
            with SummaryWriter(log_dir=str(folder)) as writer:
                for (at, tag), value in sorted(points.items()):
                    writer.add_scalar(tag, value, at)
            for path in old:
                path.unlink()


def _points(events: Path) -> Iterator[tuple[tuple[int, str], float]]:
    """((step, tag), value) of every scalar in an event file; stops at a half-written one."""
    for record in RawEventFileLoader(str(events)).Load():
        event = Event.FromString(record)
        for value in event.summary.value:
            yield (event.step, value.tag), value.simple_value


def _tag(result: Result) -> str:
    settings = result.settings
    parts = ["eval", str(settings.get("ruler_task", result.task)), result.metric]
    parts += [f"{name}_{settings[name]}" for name in TAGGED if name in settings]
    return "/".join(parts)


def tables(results: Sequence[Result]) -> list[Table]:
    """The results for a terminal, one table for each task and settings."""
    out: dict[str, Table] = {}
    for result in results:
        title = f"{result.task} (version {result.version}) {brief(result.settings)}"
        if title not in out:
            out[title] = Table(title=title, title_justify="left")
            out[title].add_column("metric", no_wrap=True)
            for name in ("value", "+- s.e.", "count"):
                out[title].add_column(name, justify="right", no_wrap=True)
            out[title].add_column("unit")
        error = result.standard_error
        settings = result.settings
        bucket = f" {settings['from']}-{settings['to']}" if "to" in settings else ""
        out[title].add_row(
            result.metric + bucket,
            f"{result.value:.4f}",
            "" if error is None else f"{error:.4f}",
            f"{result.count:,}",
            result.unit,
        )
    return list(out.values())


def brief(settings: dict[str, Any]) -> str:
    """The settings that tell tables apart, in words; trained_length marks longer input."""
    shown = (
        *("ruler_task", "variant", "length", "answer_tokens", "pairs", "copied"),
        *("split", "window", "stride", "row_tokens", "trained_length"),
    )
    return " ".join(f"{name}={settings[name]}" for name in shown if name in settings)
