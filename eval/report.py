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

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

from eval.result import Result
from models.checkpoint_directory import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    file_sha256,
    read_manifest,
    write_atomically,
)

FORMAT_VERSION = 1
FILE_NAME = "results.json"


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


def describe(model_dir: Path) -> dict[str, Any]:
    """Which model was evaluated: path, step (None outside a run), and what its bytes are."""
    tokenizer = model_dir / "tokenizer.model"
    in_run = (model_dir / MANIFEST_NAME).is_file()
    return {
        "path": str(model_dir),
        "step": read_manifest(model_dir).get("step") if in_run else None,
        "weights_sha256": file_sha256(model_dir / "model.safetensors"),
        "tokenizer_sha256": file_sha256(tokenizer) if tokenizer.is_file() else None,
    }


def earlier_results(output: Path, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Results that `output` already holds. ValueError where it is another file or of another model.

    Called before any work is done, so that hours of scoring never end at a file that may not be
    written.
    """
    if not output.exists():
        return []
    try:
        content = json.loads(output.read_bytes())
        version = content["format_version"]
        weights = content["model"]["weights_sha256"]
        results = list(content["results"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"output exists and holds no results: got {output}; expected a new file or a "
            "results.json; "
            "give another --output"
        ) from None
    if version != FORMAT_VERSION or weights != model["weights_sha256"]:
        raise ValueError(
            f"output holds results of another model: got weights {weights} in {output}; "
            f"expected {model['weights_sha256']}; give another --output or move the file away"
        )
    return results


def write_results(
    output: Path,
    model: dict[str, Any],
    earlier: Sequence[dict[str, Any]],
    results: Sequence[Result],
) -> None:
    """Writes `earlier` updated by `results`, atomically."""
    merged = {_key(entry): entry for entry in earlier}
    merged |= {_key(entry): entry for entry in map(_as_json, results)}
    content = {
        "format_version": FORMAT_VERSION,
        "model": model,
        "results": list(merged.values()),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def _as_json(result: Result) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(result)))


def _key(entry: dict[str, Any]) -> str:
    identity = [entry[name] for name in ("task", "version", "metric", "settings")]
    return json.dumps(identity, sort_keys=True)


def write_scalars(run: Path, step: int, results: Sequence[Result]) -> None:
    """One scalar per result at `step`, tag eval/<task>/<metric>, with the length or pairs where
    there are several."""
    with SummaryWriter(log_dir=str(run / "tensorboard" / "eval")) as writer:
        for result in results:
            writer.add_scalar(_tag(result), result.value, step)


def _tag(result: Result) -> str:
    parts = ["eval", result.task, result.metric]
    parts += [
        f"{name}_{result.settings[name]}" for name in ("length", "pairs") if name in result.settings
    ]
    return "/".join(parts)


def tables(results: Sequence[Result]) -> list[Table]:
    """The results for a terminal, one table for each task and settings."""
    out: dict[str, Table] = {}
    for result in results:
        title = f"{result.task} (version {result.version}) {_brief(result.settings)}"
        if title not in out:
            out[title] = Table(title=title, title_justify="left")
            out[title].add_column("metric", no_wrap=True)
            for name in ("value", "+- s.e.", "count"):
                out[title].add_column(name, justify="right", no_wrap=True)
            out[title].add_column("unit")
        error = result.standard_error
        out[title].add_row(
            result.metric,
            f"{result.value:.4f}",
            "" if error is None else f"{error:.4f}",
            f"{result.count:,}",
            result.unit,
        )
    return list(out.values())


def _brief(settings: dict[str, Any]) -> str:
    shown = ("length", "answer_tokens", "pairs", "split", "window", "stride", "row_tokens")
    return " ".join(f"{name}={settings[name]}" for name in shown if name in settings)
