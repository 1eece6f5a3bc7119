"""Where a run starts, and its folder; pretrain/saver.py writes what this reads.

    RUN/checkpoints/step-00000100/
        engine/              optimizer state, a file of each rank (pretrain/state.py)
        config.json, model.safetensors, tokenizer.model
                             the model directory: what eval, generate and export read, and the
                             master weights
        checkpoint.json      written last: step, tokens, configuration, ranks, ..., every file
    RUN/checkpoints/latest   name of the newest complete step folder, replaced atomically

A folder without its checkpoint.json does not exist, so a save may be killed at any moment. Random
state is not stored: it is set anew at every step from (seed, step, rank). Neither is the position
in the data, which follows from the step. Nothing here depends on the number of ranks or on the ZeRO
stage, so both may change from one start to the next.
"""

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from data_prep.shards import Manifest
from models.checkpoint_directory import (
    CHECKPOINTS_FOLDER,
    MANIFEST_NAME,
    newest_complete,
    read_manifest,
    step_folders,
    verify,
    write_atomically,
)
from pretrain import watchdog
from pretrain.config import LOGS_FOLDER, STOP_FILE, RunConfig, check_run_dir, dump_config
from pretrain.metrics import LOG_NAME
from pretrain.same_run import refuse_other_run

CONFIG_NAME = "config.yaml"
LOCK_NAME = ".lock"
STATE_FORMAT = 2
"""Of engine/; 1 was DeepSpeed's own shards."""


class Facts(TypedDict):
    """What checkpoint.json says beside its list of files.

    updates_taken: steps less those whose update was skipped.
    health: pretrain/health.py.
    world_size, zero_stage: of the run that wrote it, for the record.
    """

    state_format: int
    step: int
    tokens: int
    sample_position: int
    updates_taken: int
    health: dict[str, Any]
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
    updates_taken: int = 0
    health: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    """One line for each newer checkpoint that was passed over, and why."""


def check_config_place(config: RunConfig, config_path: Path) -> None:
    """ValueError where the run would write its config.yaml over the different file it is read from.

    The config.yaml that a run wrote may be read to go on with it: nothing of it changes.
    """
    own = config.run_dir / CONFIG_NAME
    if not (own.is_file() and config_path.samefile(own)):
        return
    if own.read_bytes() != dump_config(config).encode():
        raise ValueError(
            f"the run would overwrite the config that it reads: got {config_path} in "
            f"run_dir={config.run_dir}; expected a file elsewhere; move or rename it, or choose "
            "another run_dir"
        )


def find_start(config: RunConfig, manifest: Manifest) -> Start:
    """Where the run in config.run_dir goes on.

    Raises:
        ValueError: the folder belongs to something else, to a run with other settings, or holds
            only damaged checkpoints; or the newest one is damaged and older ones are not to be
            used; or the checkpoint to branch from is none of such a run.
    """
    run_dir = config.run_dir
    check_run_dir(run_dir)
    if run_dir.is_dir() and _is_foreign(run_dir):
        raise ValueError(
            f"run_dir holds files of something else: got {run_dir}; expected a run of this "
            "program or an empty folder; choose another run_dir"
        )
    folder, passed_over = newest_complete(run_dir)
    steps = step_folders(run_dir)
    newer = steps[: len(passed_over)]
    damaged = [path for path in newer if (path / MANIFEST_NAME).exists()]
    if damaged and (folder is None or not config.checkpoint.use_older):
        raise ValueError(
            f"no undamaged checkpoint in {run_dir}: {'; '.join(passed_over)}; restore the "
            f"files, or remove {run_dir / CHECKPOINTS_FOLDER} to start from step 0"
            if folder is None
            else f"newest checkpoint of {run_dir} is damaged: {'; '.join(passed_over)}; restore "
            f"the files, or go on from {folder.name} with checkpoint.use_older=true"
        )
    if folder is None:
        folder = config.training.branch_from
        if folder is None:
            return Start(notes=passed_over)
        if problems := verify(folder):
            raise ValueError(
                f"training.branch_from is no complete checkpoint: got {folder}: "
                f"{'; '.join(problems)}; expected the step folder of a run"
            )
    facts = read_manifest(folder)
    if facts.get("state_format") != STATE_FORMAT:
        raise ValueError(
            f"{folder} cannot be resumed by this version: got state_format "
            f"{facts.get('state_format', 1)}; expected {STATE_FORMAT}; evaluate or export it, or "
            "train in another run_dir"
        )
    refuse_other_run(facts, config, manifest, folder)
    return Start(facts["step"], folder, facts["updates_taken"], facts["health"], passed_over)


def open_run_folder(config: RunConfig) -> None:
    """Makes the run's folder this process's own until it ends, and writes config.yaml.

    Raises:
        ValueError: it cannot be written, or another process trains in it at this moment.
    """
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        # Held open on purpose: the lock ends with the process, however that ends.
        lock = os.open(config.run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_atomically(config.run_dir / CONFIG_NAME, dump_config(config).encode())
    except BlockingIOError:
        raise ValueError(
            f"run_dir is in use: got {config.run_dir}; expected a run that nobody else trains; "
            "wait for that one or choose another run_dir"
        ) from None
    except OSError as error:
        raise ValueError(
            f"run_dir cannot be written: got {config.run_dir}: {error.strerror}; expected a folder "
            "with room that you may write to; choose another run_dir or make room"
        ) from None
    # Of a stop that came when nothing ran any more; asked for from now on, it counts.
    (config.run_dir / STOP_FILE).unlink(missing_ok=True)
    watchdog.clear(config.run_dir)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes the random state of a step a function of where it is in the run."""
    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def _is_foreign(folder: Path) -> bool:
    """Whether a folder holds something, but not a run."""
    names = {path.name for path in folder.iterdir()}
    if CONFIG_NAME in names:  # a name that many programs use
        return names.isdisjoint((LOCK_NAME, LOG_NAME, CHECKPOINTS_FOLDER))
    # A kill in the first moments leaves the lock and a temporary config.yaml.
    ours = (LOCK_NAME, STOP_FILE, LOGS_FOLDER)
    return not all(name in ours or name.startswith(CONFIG_NAME) for name in names)
