"""One evaluation: which models, checked before any work, scored unit by unit.

A unit is one task on one model. Units run one after the other here, or as Ray tasks (spread.py);
results are written after every unit and samples as they come, so whatever stops an evaluation, the
same command goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.tokenizer import Tokenizer
from eval import report
from eval.result import Options, Result, Subject
from eval.samples import SampleStore
from eval.scoring import Model
from eval.task import find_task
from models.checkpoint_directory import MANIFEST_NAME, read_manifest, resolve, step_folders, verify
from models.config import ModelConfig
from models.language_model import LanguageModel
from models.weights import load_config, load_model


class EvaluationFailed(Exception):
    """What went wrong after every check had passed, in one line."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One model to score and where its results go."""

    model_dir: Path
    described: dict[str, Any]
    output: Path
    run: Path | None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One task on one model; can be sent to another process."""

    target: Target
    task: str
    options: Options
    device: str
    beyond_trained: bool


Run = Callable[[Sequence[Unit]], Iterable[tuple[Unit, list[Result]]]]


def targets(
    checkpoints: Sequence[Path], output: Path | None, *, all_checkpoints: bool
) -> list[Target]:
    """The models that the paths mean, in order, each once.

    Raises:
        FileNotFoundError, ValueError: there is no such model; an output that cannot be written or
            holds something else; `output` for several models.
    """
    folders = list(
        dict.fromkeys(f for path in checkpoints for f in _model_dirs(path, all_checkpoints))
    )
    if output is not None and len(folders) > 1:
        raise ValueError(
            f"--output is for one model: got {output} for {len(folders)}; expected none; leave it "
            "out, and each model's results go to its own folder"
        )
    found = []
    for folder in folders:
        target = Target(
            model_dir=folder,
            described=report.describe(folder),
            output=report.default_output(folder) if output is None else output,
            run=report.run_of(folder),
        )
        report.earlier_results(target.output, target.described)
        report.check_writable(target.output.parent)
        if target.run is not None:
            report.check_writable(report.scalars_folder(target.run))
        found.append(target)
    return found


def _model_dirs(path: Path, all_checkpoints: bool) -> list[Path]:
    if not all_checkpoints:
        return [resolve(path)]
    steps = [folder for folder in reversed(step_folders(path)) if not verify(folder, hashes=False)]
    if not steps:
        raise FileNotFoundError(
            f"no complete checkpoint in {path}: expected a run for --all-checkpoints"
        )
    return [resolve(folder) for folder in steps]


def checked_units(
    found: Sequence[Target],
    tasks: Sequence[str],
    options: Options,
    *,
    device: str,
    beyond_trained: bool = False,
) -> list[Unit]:
    """Every task on every model, model by model.

    Raises:
        FileNotFoundError, ValueError: a task refuses a model.
    """
    units = []
    for target in found:
        subject = None
        for task in tasks:
            unit = Unit(
                target=target,
                task=task,
                options=options,
                device=device,
                beyond_trained=beyond_trained,
            )
            subject = subject or load_subject(unit, weights=False)
            find_task(task).check(subject, options)
            units.append(unit)
    return units


def evaluate(units: Sequence[Unit], run: Run | None = None) -> dict[Path, list[Result]]:
    """Scores the units; results go to results.json and TensorBoard as they come.

    Args:
        run: yields each unit with its results as it ends; None runs them here, one by one.

    Returns:
        The new results, by model directory.

    Raises:
        EvaluationFailed: a task failed.
    """
    results: dict[Path, list[Result]] = {unit.target.model_dir: [] for unit in units}
    try:
        for unit, new in _run_here(units) if run is None else run(units):
            target = unit.target
            results[target.model_dir] += new
            report.write_results(target.output, target.described, new)
            if target.run is not None:
                report.write_scalars(target.run, target.described["step"], new)
    except (OSError, ValueError) as error:
        raise EvaluationFailed(one_line(error)) from error
    return results


def _run_here(units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Result]]]:
    subject: Subject | None = None
    loaded: Target | None = None
    for unit in units:
        if subject is None or unit.target != loaded:
            subject = None  # one model in memory at a time
            subject, loaded = load_subject(unit), unit.target
        print(f"{unit.task} on {unit.target.model_dir}", file=sys.stderr, flush=True)
        yield unit, find_task(unit.task).run(subject, unit.options)


def run_unit(unit: Unit) -> list[Result]:
    """One task on one model, from its files."""
    return find_task(unit.task).run(load_subject(unit), unit.options)


def load_subject(unit: Unit, *, weights: bool = True) -> Subject:
    """The unit's model on its device, with its tokenizer where the directory has one.

    Args:
        weights: False makes a model without numbers, for a task's `check`.
    """
    target = unit.target
    model: Model
    if weights:
        model = load_model(target.model_dir, device=unit.device)
        config = model.config
    else:
        config = load_config(target.model_dir)
        with torch.device("meta"):
            model = LanguageModel(config)
    store = SampleStore(
        target.output.parent if weights else None,
        target.described["weights_sha256"],
        target.described["tokenizer_sha256"],
    )
    return replace(
        describe_subject(target.model_dir, model, config),
        device=unit.device,
        beyond_trained=unit.beyond_trained,
        samples=store,
    )


def describe_subject(model_dir: Path, model: Model, config: ModelConfig) -> Subject:
    """A Subject on the CPU that keeps no samples."""
    path = model_dir / "tokenizer.model"
    tokenizer = Tokenizer.load(path) if path.is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"tokenizer is larger than the model's vocabulary: got {tokenizer.vocab_size} ids in "
            f"{path}; expected at most {config.vocab_size}; use the tokenizer that the model "
            "was trained with"
        )
    return Subject(
        model=model,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_seq_len,
        tokenizer=tokenizer,
        device="cpu",
        trained_length=trained_length(model_dir, config),
    )


def trained_length(model_dir: Path, config: ModelConfig) -> int | None:
    """Tokens of the rows a model was trained on, where its files say so: a checkpoint's run does,
    and a model that was grown knows the levels it had before."""
    if (model_dir / MANIFEST_NAME).is_file():
        facts = read_manifest(model_dir).get("config", {})
        length = facts.get("data", {}).get("seq_len")
        if isinstance(length, int):
            return length
    grown = config.level_weights.grown_from
    if grown and config.level_weights.tied_above is None:
        return 1 << (grown[-1] - 1)  # the longest row of so many levels
    return None


def one_line(error: OSError | ValueError) -> str:
    """The message; the system's own refusals of a file get the form of the others."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)
