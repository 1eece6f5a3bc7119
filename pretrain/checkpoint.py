"""Training state on disk: one writer, one reader.

    RUN/checkpoints/step-00000100/
        engine/              DeepSpeed's shards (parameters, optimizer state), read to resume
        config.json, model.safetensors, tokenizer.model
                             the model directory: what eval, generate and export read
        checkpoint.json      written last: step, tokens, configuration, ranks, ..., every file
    RUN/checkpoints/latest   name of the newest complete step folder, replaced atomically

A folder without its checkpoint.json does not exist, so a save may be killed at any moment. Random
state is not stored: it is set anew at every step from (seed, step, rank). Neither is the position
in the data, which is the step.
"""

import fcntl
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from safetensors import SafetensorError

from data_prep.shards import Manifest
from data_prep.shards import read_manifest as read_dataset_manifest
from models.checkpoint_directory import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    newest_complete,
    read_manifest,
    step_folder,
    step_folders,
    sync_folder,
    write_atomically,
    write_manifest,
)
from models.weights import save_model
from pretrain.config import STOP_FILE, RunConfig, check_run_dir, dump_config
from pretrain.distributed import World
from pretrain.engine import ENGINE_FOLDER, Engine
from pretrain.errors import TrainingFailed
from pretrain.schedule import learning_rate

CONFIG_NAME = "config.yaml"
LOCK_NAME = ".lock"
RANDOM_RULE = "torch seeded with SeedSequence([seed, step, rank]) before every step"


class Facts(TypedDict):
    """What checkpoint.json says beside its list of files."""

    step: int
    tokens: int
    sample_position: int
    random_state: str
    world_size: int
    zero_stage: int
    dataset: dict[str, Any]
    config: dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Where a run starts: at a complete checkpoint, or at step 0."""

    step: int = 0
    folder: Path | None = None
    notes: list[str] = field(default_factory=list)
    """One line for each newer checkpoint that was passed over, and why."""


def find_start(config: RunConfig, manifest: Manifest, world_size: int) -> Start:
    """Where the run in config.run_dir goes on.

    Raises:
        ValueError: the folder belongs to something else, to a run with other settings, or holds
            only damaged checkpoints.
    """
    run_dir = config.run_dir
    check_run_dir(run_dir)
    if run_dir.is_dir() and _is_foreign(run_dir):
        raise ValueError(
            f"run_dir holds files of something else: got {run_dir}; expected a run of this "
            "program or an empty folder; choose another run_dir"
        )
    folder, passed_over = newest_complete(run_dir)
    if folder is None:
        damaged = [path for path in step_folders(run_dir) if (path / MANIFEST_NAME).exists()]
        if damaged:
            raise ValueError(
                f"no undamaged checkpoint in {run_dir}: {'; '.join(passed_over)}; restore the "
                f"files, or remove {run_dir / CHECKPOINTS_FOLDER} to start from step 0"
            )
        return Start(notes=passed_over)
    facts = read_manifest(folder)
    _refuse_other_run(facts, config, manifest, folder)
    if facts["step"] < config.training.total_steps:
        _refuse_other_ranks(facts, config, world_size, folder)
    return Start(facts["step"], folder, passed_over)


def open_run_folder(config: RunConfig) -> None:
    """Makes the run's folder this process's own until it ends, and writes config.yaml.

    Raises:
        ValueError: it cannot be written, or another process trains in it at this moment.
    """
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(config.run_dir / CONFIG_NAME, dump_config(config).encode())
    except OSError as error:
        raise ValueError(
            f"run_dir cannot be written: got {config.run_dir}: {error.strerror}; expected a folder "
            "with room that you may write to; choose another run_dir or make room"
        ) from None
    # Held open on purpose: the lock ends with the process, however that ends.
    lock = os.open(config.run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"run_dir is in use: got {config.run_dir}; expected a run that nobody else trains; "
            "wait for that one or choose another run_dir"
        ) from None
    # Of a stop that came when nothing ran any more; asked for from now on, it counts.
    (config.run_dir / STOP_FILE).unlink(missing_ok=True)


def save(engine: Engine, config: RunConfig, manifest: Manifest, world: World, step: int) -> Path:
    """Writes the checkpoint of `step` and makes it the latest; all ranks take part.

    Older ones beyond keep_last are removed.

    Returns:
        The step folder.

    Raises:
        TrainingFailed: it cannot be written; those before it stay as they are.
    """
    folder = step_folder(config.run_dir, step)
    try:
        _write(engine, config, manifest, world, step, folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise TrainingFailed(
            f"cannot write checkpoint {folder}: {_why(error, config.run_dir)}; the newest complete "
            "one stays; mend that and start the same command again"
        ) from error
    return folder


def _write(
    engine: Engine, config: RunConfig, manifest: Manifest, world: World, step: int, folder: Path
) -> None:
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a save that was killed
        folder.mkdir(parents=True)
    world.barrier()
    engine.save(folder)
    weights = engine.full_weights()
    _sync_own_shards(folder / ENGINE_FOLDER, world.rank)
    world.barrier()
    if world.rank == 0:
        for script in folder.glob("*.py"):
            script.unlink()  # DeepSpeed adds converters; a checkpoint holds no code
        tokenizer = config.data.dataset / "tokenizer.model"
        save_model(
            folder, weights, config.model, tokenizer_path=tokenizer if tokenizer.is_file() else None
        )
        sync_folder(folder / ENGINE_FOLDER)
        write_manifest(folder, _facts(config, manifest, world.size, step))
        sync_folder(folder.parent)
        write_atomically(folder.parent / "latest", f"{folder.name}\n".encode())
        _remove_old(config, folder)
    world.barrier()


def _why(error: Exception, run_dir: Path) -> str:
    """The reason in a few words; torch and safetensors do not name a full disk as such."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    free = shutil.disk_usage(run_dir).free
    if free < 1 << 20:
        return f"no space left on device ({free:,} bytes free)"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes the random state of a step a function of where it is in the run."""
    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def _is_foreign(folder: Path) -> bool:
    """Whether a folder holds something, but not a run."""
    names = [path.name for path in folder.iterdir()]
    # A kill in the first moments leaves a temporary config.yaml.
    return CONFIG_NAME not in names and not all(name.startswith(CONFIG_NAME) for name in names)


def _facts(config: RunConfig, manifest: Manifest, world_size: int, step: int) -> Facts:
    return Facts(
        step=step,
        tokens=step * config.batch.batch_tokens,
        sample_position=step * config.batch_rows,
        random_state=RANDOM_RULE,
        world_size=world_size,
        zero_stage=config.parallel.zero_stage,
        dataset=_dataset_facts(config, manifest),
        config=config.model_dump(mode="json"),
    )


def _dataset_facts(config: RunConfig, manifest: Manifest) -> dict[str, Any]:
    """What decides the training rows, wherever the data sets lie."""
    mixed = [read_dataset_manifest(other.dataset) for other in config.data.mixed_with]
    return {
        "kind": manifest.kind,
        "row_tokens": manifest.row_tokens,
        "vocab_size": manifest.vocab_size,
        "train_rows": manifest.splits["train"].rows,
        "train_index_sha256": manifest.splits["train"].index_sha256,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "mixed_with_index_sha256": [other.splits["train"].index_sha256 for other in mixed] or None,
    }


def _remove_old(config: RunConfig, newest: Path) -> None:
    """Removes checkpoints beyond keep_last, and what killed saves and removals left behind."""
    older = step_folders(config.run_dir)
    older = older[older.index(newest) + 1 :]
    complete = [path for path in older if (path / MANIFEST_NAME).exists()]
    keep = (
        complete
        if config.checkpoint.keep_last is None
        else complete[: config.checkpoint.keep_last - 1]
    )
    for path in older:
        if path not in keep:
            # First of all the manifest: what is left of a killed removal is no checkpoint.
            (path / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(path)


def _sync_own_shards(folder: Path, rank: int) -> None:
    for path in folder.iterdir():
        owner = path.name.partition("zero_pp_rank_")[2].partition("_")[0]
        if int(owner or 0) == rank:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


# Settings that change speed, memory, or what is written, but not the numbers beyond their rounding.
_FREE = (
    "run_dir",
    "data.dataset",  # compared by content
    "data.loader_threads",
    "data.remote",
    "data.cache_bytes",
    "data.damaged_shards",
    "batch.micro_batch_rows",
    "validation",
    "checkpoint",
    "logging",
    "parallel.device",
    "parallel.zero_stage",  # refused by itself, for the shards' sake
    "training",  # compared by the learning rates
    "schedule",
    "optimizer.peak_lr",
)


def _refuse_other_run(
    facts: Mapping[str, Any], config: RunConfig, manifest: Manifest, folder: Path
) -> None:
    """Raises ValueError if going on from `folder` would not continue the same run."""
    old = _leaves(facts["config"])
    new = _leaves(config.model_dump(mode="json"))
    different = [
        f"{name}: checkpoint: {old.get(name)}, now: {new.get(name)}"
        for name in [*old, *(name for name in new if name not in old)]
        if old.get(name) != new.get(name) and not _is_free(name)
    ]
    old_data = facts["dataset"]
    different += [
        f"data set's {name}: checkpoint: {old_data.get(name)}, now: {value}"
        for name, value in _dataset_facts(config, manifest).items()
        if old_data.get(name) != value
    ]
    different += _other_learning_rates(facts, config)
    if different:
        raise ValueError(
            f"{config.run_dir} holds a run with other settings ({folder.name}): "
            + "; ".join(different)
            + "; choose another run_dir or take these back"
        )


def _other_learning_rates(facts: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Length and schedule may change while no step taken so far would have another rate."""
    old = RunConfig.model_validate(facts["config"])
    done, total = facts["step"], config.training.total_steps
    if total < done:
        return [f"training.total_steps: checkpoint is at step {done}, now: {total}"]
    for step in range(1, done + 1):
        before = learning_rate(step, old.schedule, old.optimizer.peak_lr, old.training.total_steps)
        now = learning_rate(step, config.schedule, config.optimizer.peak_lr, total)
        if before != now:
            names = ("schedule", "training", "optimizer.peak_lr")
            a, b = _leaves(old.model_dump(mode="json")), _leaves(config.model_dump(mode="json"))
            return [
                f"{name}: checkpoint: {a[name]}, now: {b[name]}"
                for name in a
                if name.startswith(names) and a[name] != b[name]
            ]
    return []


def _refuse_other_ranks(
    facts: Mapping[str, Any], config: RunConfig, world_size: int, folder: Path
) -> None:
    for name, before, now in (
        ("number of ranks", facts["world_size"], world_size),
        ("parallel.zero_stage", facts["zero_stage"], config.parallel.zero_stage),
    ):
        if before != now:
            raise ValueError(
                f"{folder} cannot be resumed with another {name}: checkpoint: {before}, now: "
                f"{now}; "
                f"start with {before}"
            )


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in _FREE)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
