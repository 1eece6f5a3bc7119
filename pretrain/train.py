"""The run, top to bottom: check, build, resume, loop, save. No callbacks: this is the order."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from data_prep.training_rows import TrainingRows
from models.accounting import parameter_count
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain import checkpoint
from pretrain.config import STOP_FILE, RunConfig, checked_manifest, load_config
from pretrain.data import AnyRows, training_batches, training_rows, validation_batches
from pretrain.distributed import World, choose_device
from pretrain.engine import Engine
from pretrain.errors import TrainingFailed
from pretrain.interrupt import Interrupt
from pretrain.metrics import Metrics
from pretrain.schedule import learning_rate

EXIT_COMPLETE = 0


def train(config_path: Path, overrides: Sequence[str], world: World) -> int:
    """Trains, or goes on training, the run of a config file.

    Args:
        config_path: YAML file of a RunConfig.
        overrides: `section.key=value` each.
        world: the ranks; every rank calls this with the same arguments.

    Returns:
        Exit code: 0 when the run is complete, 143 or 130 when SIGTERM or SIGINT stopped it after a
            checkpoint.

    Raises:
        Refused: something the user has to change, found before any training.
        TrainingFailed: loss or gradient norm is not finite, or rows cannot be read.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=world.rank != 0)
    interrupt = Interrupt()

    # Everything that can be refused is refused here, on all ranks at once.
    config = world.agree(lambda: load_config(config_path, overrides))
    device = world.agree(lambda: choose_device(config.parallel.device, world.local_rank))
    manifest = world.agree(lambda: checked_manifest(config, world.size))
    start = world.on_rank_0(lambda: checkpoint.find_start(config, manifest, world.size))
    total_steps = config.training.total_steps
    stop_file = config.run_dir / STOP_FILE
    interrupt.watch(stop_file)
    for note in start.notes:
        console.print(f"warning: {note}")
    if start.step == total_steps:
        console.print(
            f"{config.run_dir} is complete: step {start.step}/{total_steps}, {start.folder}"
        )
        return EXIT_COMPLETE

    # Data.
    rows = world.agree(lambda: training_rows(config.data))
    validation_rows = None
    if config.validation.every_steps is not None:
        validation_rows = world.agree(
            lambda: TrainingRows(config.data.dataset, "validation", config.data.seq_len)
        )

    # Model and engine: every rank builds the same parameters, DeepSpeed shards them.
    world.on_rank_0(lambda: checkpoint.open_run_folder(config))
    if world.rank == 0:
        _print_plan(config, rows, world, device, console)
    model = LanguageModel(config.model)
    initialize(model, config.seed)
    engine = Engine(model, config, world, device)
    if start.folder is not None:
        engine.load(start.folder)
        console.print(f"resuming {config.run_dir} at step {start.step} from {start.folder.name}")
    metrics = None
    if world.rank == 0:
        metrics = Metrics(config, world.size, device, start.step, console)

    # The loop.
    batches = training_batches(rows, config, world.rank, world.size, first_update=start.step)
    for step in range(start.step + 1, total_steps + 1):
        if metrics:
            metrics.step_begins()
        checkpoint.seed_step(config.seed, step, world.rank)
        lr = learning_rate(step, config.schedule, config.optimizer.peak_lr, total_steps)
        update = engine.update(next(batches), lr, stop_requested=interrupt.requested)
        if not update.is_finite:
            raise TrainingFailed(
                f"step {step} is not finite: got loss {update.loss}, gradient norm "
                f"{update.grad_norm}; nothing of it was saved; lower optimizer.peak_lr or lengthen "
                "schedule.warmup_steps",
                on_all_ranks=True,
            )
        if metrics:
            metrics.step_ends(step, update, lr)

        last = step == total_steps
        if validation_rows is not None and (last or _is_due(step, config.validation.every_steps)):
            began = time.perf_counter()
            loss = engine.validation_loss(
                validation_batches(validation_rows, config, world.rank, world.size)
            )
            if metrics:
                metrics.validation_ends(step, loss, time.perf_counter() - began)
        if last or update.stop_requested or _is_due(step, config.checkpoint.every_steps):
            began = time.perf_counter()
            if metrics:
                metrics.sync()
            folder = checkpoint.save(engine, config, manifest, world, step)
            console.print(f"saved {folder} ({time.perf_counter() - began:.1f} s)")
        if update.stop_requested and not last:
            if world.rank == 0:
                stop_file.unlink(missing_ok=True)
            console.print("stopped as asked; start the same command again to go on")
            return interrupt.exit_code

    if metrics:
        metrics.close()
    console.print(f"{config.run_dir} is complete: step {total_steps}/{total_steps}")
    return EXIT_COMPLETE


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _print_plan(
    config: RunConfig, rows: AnyRows, world: World, device: torch.device, console: Console
) -> None:
    parameters = parameter_count(config.model)
    mixer = (
        config.model.mixer if isinstance(config.model.mixer, str) else "+".join(config.model.mixer)
    )
    total_tokens = config.training.total_steps * config.batch.batch_tokens
    epochs = total_tokens / (len(rows) * config.data.seq_len)
    micro_batches = config.micro_batches(world.size)
    console.print(
        f"{config.run_dir}: {mixer}, {parameters:,} parameters, {config.model.num_layers} layers, "
        f"{config.model.num_levels} levels\n"
        f"data {config.data.dataset}: {len(rows):,} rows of {config.data.seq_len} tokens; "
        f"run of {total_tokens:,} tokens = {epochs:.2f} epochs\n"
        f"{world.size} x {device.type}, ZeRO-{config.parallel.zero_stage}, "
        f"{config.parallel.precision} compute, fp32 parameters, gradients and optimizer; "
        f"{micro_batches} x {config.batch.micro_batch_rows} rows an update and rank"
    )
