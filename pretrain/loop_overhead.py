"""python -m pretrain bench-loop CONFIG: what our loop costs over bare DeepSpeed, same model.

Ours is `train` as it is, run folder, metrics and all, timed from one line of log.jsonl to the next.
Bare is deepspeed.initialize with the same loss, torch's AdamW over the same parameter groups and
the same rows, and a loop of forward, backward, step that reads the loss once an update. The two
take turns, so that whatever else the machine does falls on both.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain.config import RunConfig, checked_manifest, dump_config, load_config
from pretrain.data import training_batches, training_rows
from pretrain.distributed import World, choose_device
from pretrain.engine import deepspeed_settings, import_deepspeed
from pretrain.loss import SummedLoss
from pretrain.metrics import LOG_NAME
from pretrain.optimizer import parameter_table
from pretrain.train import train

WARMUP = 5
"""Updates that are not counted, at the start of every round."""


@dataclass(frozen=True)
class Overhead:
    """Median seconds of an update in every round: wall clock, and CPU time of this process."""

    ours: list[tuple[float, float]]
    bare: list[tuple[float, float]]

    def percent(self, clock: int) -> float:
        """How much longer an update of ours takes: the median of the rounds, in each of which the
        two ran one after the other.

        Args:
            clock: 0 for the wall clock, 1 for CPU time: what counts where other programs run.
        """
        pairs = zip(self.ours, self.bare, strict=True)
        return 100 * (statistics.median(a[clock] / b[clock] for a, b in pairs) - 1)


def measure_overhead(
    config_path: Path, overrides: Sequence[str], world: World, updates: int, rounds: int
) -> Overhead:
    """Times both loops; all ranks take part, and rank 0 gets the numbers.

    Raises:
        Refused: the config cannot be run.
    """
    config = world.agree(lambda: load_config(config_path, overrides))
    world.agree(lambda: checked_manifest(config, world.size))
    device = world.agree(lambda: choose_device(config.parallel.device, world.local_rank))
    folder = world.on_rank_0(lambda: tempfile.mkdtemp(prefix="bench-"))
    result = Overhead([], [])
    for number in range(rounds):
        run = bench_config(config, Path(folder) / f"round-{number}", WARMUP + updates)
        path = Path(folder) / f"round-{number}.yaml"
        world.on_rank_0(partial(path.write_text, dump_config(run)))
        train(path, [], world)
        if world.rank == 0:
            result.ours.append(_medians_of_log(run.run_dir / LOG_NAME))
        result.bare.append(_bare(run, world, device))
    world.on_rank_0(partial(shutil.rmtree, folder, ignore_errors=True))
    return result


def bench_config(config: RunConfig, run_dir: Path, updates: int) -> RunConfig:
    """The run with nothing in it but updates and their metrics."""
    tree = config.model_dump(mode="json")
    tree["run_dir"] = str(run_dir)
    tree["training"] |= {"total_steps": updates, "branch_from": None, "time_limit_minutes": None}
    tree["schedule"] = {"kind": "constant"}
    tree["validation"] = {"every_steps": None}
    tree["checkpoint"] |= {"every_steps": updates + 1, "after_last": False}
    tree["logging"]["statistics_every_steps"] = None
    tree["batch"]["stages"] = []
    tree["profile"]["steps"] = None
    return RunConfig.model_validate(tree)


def _medians_of_log(log: Path) -> tuple[float, float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    cpu = [line["cpu_seconds"] for line in lines]
    return _median([line["time"] for line in lines]), statistics.median(cpu[WARMUP:])


def _bare(config: RunConfig, world: World, device: torch.device) -> tuple[float, float]:
    deepspeed = import_deepspeed(device)
    model = LanguageModel(config.model)
    initialize(model, config.seed)
    module = SummedLoss(
        model.to(device),
        device,
        config.parallel.precision,
        config.training.z_loss,
        config.training.loss_chunk_tokens,
    )
    accumulated = config.batch_rows // (config.batch.micro_batch_rows * world.size)
    settings = deepspeed_settings(config, world.size) | {
        "train_batch_size": config.batch_rows,
        "gradient_accumulation_steps": accumulated,
    }
    optimizer = _adamw(model, config)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    rows = training_rows(config.data)
    times, cpu = [], []
    for micro_batches in training_batches(rows, config, world.rank, world.size, first_update=0):
        objective: Any = None
        for batch in micro_batches:
            moved = batch.to(device)
            objective, _ = engine(moved.tokens, moved.labels, moved.cu_seqlens)
            engine.backward(objective / batch.valid_tokens)
            engine.step()
        objective.item()
        times.append(time.time())
        cpu.append(time.process_time())
    engine.destroy()
    return _median(times), _median(cpu)


def _adamw(model: nn.Module, config: RunConfig) -> AdamW:
    parameters, settings = dict(model.named_parameters()), config.optimizer
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for (_, decay), names in parameter_table(model, settings).items()
    ]
    return AdamW(groups, settings.peak_lr, settings.betas, settings.eps)


def _median(times: Sequence[float]) -> float:
    counted = times[WARMUP - 1 :]
    return statistics.median(b - a for a, b in zip(counted, counted[1:], strict=False))
