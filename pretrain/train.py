"""The run, top to bottom: check, build, resume, loop, save. No callbacks: this is the order."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from data_prep.training_rows import TrainingRows
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain import checkpoint
from pretrain.batch_plan import BatchPlan
from pretrain.config import STOP_FILE, RunConfig, checked_manifest, load_config
from pretrain.curves import has_validation
from pretrain.data import rows_between, training_batches, training_rows, validation_batches
from pretrain.distributed import World, choose_device
from pretrain.engine import Engine
from pretrain.errors import TrainingFailed
from pretrain.health import Health, Verdict
from pretrain.interrupt import REASONS, Interrupt, exit_code, reason_of
from pretrain.metrics import LOG_NAME, Metrics, check_wandb
from pretrain.plan import plan_lines
from pretrain.profiler import Profiler
from pretrain.saver import Saver
from pretrain.schedule import learning_rate
from pretrain.state import read_weights
from pretrain.watchdog import Watchdog

EXIT_COMPLETE = 0


def train(config_path: Path, overrides: Sequence[str], world: World) -> int:
    """Trains, or goes on training, the run of a config file.

    Args:
        config_path: YAML file of a RunConfig.
        overrides: `section.key=value` each.
        world: the ranks; every rank calls this with the same arguments.

    Returns:
        Exit code: 0 when the run is complete, another one when it was asked to stop
            (pretrain/interrupt.py) and has saved a checkpoint.

    Raises:
        Refused: something the user has to change, found before any training.
        TrainingFailed: updates that are not finite, a checkpoint or rows that cannot be written or
            read.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=world.rank != 0)
    interrupt = Interrupt()

    # Everything that can be refused is refused here, on all ranks at once.
    config = world.agree(lambda: load_config(config_path, overrides))
    device = world.agree(lambda: choose_device(config.parallel.device, world.local_rank))
    manifest = world.agree(lambda: checked_manifest(config, world.size))
    world.on_rank_0(lambda: checkpoint.check_config_place(config, config_path))
    start = world.on_rank_0(lambda: checkpoint.find_start(config, manifest))
    for note in start.notes:
        console.print(f"warning: {note}")
    total_steps = config.training.total_steps
    unvalidated = world.on_rank_0(lambda: _lacks_validation(config, start.step))
    if start.step == total_steps and not unvalidated:
        console.print(
            f"{config.run_dir} is complete: step {start.step}/{total_steps}, {start.folder}"
            + _skipped(start.step - start.updates_taken)
        )
        return EXIT_COMPLETE
    rows = world.agree(lambda: training_rows(config.data))
    validation_rows = None
    if config.validation.every_steps is not None:
        validation_rows = world.agree(
            lambda: TrainingRows(config.data.dataset, "validation", config.data.seq_len)
        )
    world.on_rank_0(lambda: check_wandb(config))
    world.on_rank_0(lambda: checkpoint.open_run_folder(config))
    interrupt.watch(config.run_dir / STOP_FILE, config.training.time_limit_minutes)
    watchdog = Watchdog(config.run_dir, world.rank, config.health)

    # Model and engine: every rank builds the same parameters, DeepSpeed shards them.
    for line in world.agree(lambda: plan_lines(config, len(rows), world.size, device.type)):
        console.print(line)
    model = LanguageModel(config.model)
    if start.folder is None:
        initialize(model, config.seed)
    else:
        read_weights(start.folder, model)
    engine = Engine(model, config, world, device)
    if start.folder is not None:
        engine.load(start.folder, start.updates_taken)
        console.print(f"resuming {config.run_dir} at step {start.step} from {start.folder.name}")
    if code := exit_code(world.sum(interrupt.votes())):
        console.print(f"stopped by {reason_of(code)} before an update; nothing is lost")
        watchdog.close()
        return code
    plan, health = BatchPlan(config), Health(config.health, start.health)
    saver = Saver(engine, config, manifest, world, console)
    metrics = world.agree(
        lambda: (
            Metrics(config, world.size, device, start.step, console) if world.rank == 0 else None
        )
    )
    profiler = Profiler(config, world.rank, device)

    def validate(step: int) -> int | None:
        """Records the validation loss; or returns the exit code where a stop is asked for."""
        assert validation_rows is not None
        began, code = time.perf_counter(), None

        def go_on() -> bool:
            nonlocal code
            watchdog.progress(f"validation after update {step}")
            code = exit_code(world.sum(interrupt.votes()))
            return code is None

        batches = validation_batches(validation_rows, config, world.rank, world.size)
        loss = engine.validation_loss(batches, go_on)
        if metrics and loss is not None:
            metrics.validation_ends(step, loss, time.perf_counter() - began)
        return code

    def save(step: int) -> None:
        watchdog.progress(f"save after update {step}")
        if metrics:
            metrics.sync()
        saver.save(step, health)

    # The loop.
    saved_step = step = start.step
    batches = training_batches(rows, config, world.rank, world.size, first_update=start.step)
    try:
        code = validate(start.step) if unvalidated else None
        while code is None and step < total_steps:
            step += 1
            watchdog.progress(f"update {step}")
            profiler.step_begins(step)
            if metrics:
                metrics.step_begins()
            checkpoint.seed_step(config.seed, step, world.rank)
            lr = learning_rate(step, config.schedule, config.optimizer.peak_lr, total_steps)
            began = time.perf_counter()
            micro_batches = next(batches)
            engine.clock.add("data", time.perf_counter() - began)
            update = engine.update(
                micro_batches,
                lr,
                health,
                votes=[*interrupt.votes(), *saver.votes()],
                with_group_norms=_is_due(step, config.logging.every_steps),
            )
            watchdog.update_done()
            read = rows_between(
                plan.first_row(step), plan.rows(step), rows, config.data.shuffle_seed
            )
            if metrics:
                metrics.step_ends(step, update, lr, engine.clock.read(), read)
            if update.verdict is not Verdict.TAKE:
                console.print(
                    f"warning: update {step} was {update.verdict.value}: loss {update.loss}, "
                    f"gradient norm {update.grad_norm}, rows {read}"
                )
            health.record(step, update.loss, update.grad_norm, update.verdict)
            profiler.step_ends(step)
            if _is_due(step, config.logging.statistics_every_steps):
                seen = engine.statistics(micro_batches[0])
                if metrics:
                    metrics.statistics(step, seen)

            code = exit_code(update.votes[: len(REASONS)])
            saver.heed(update.votes[len(REASONS) :])
            last = step == total_steps
            if last and not engine.updates_taken:
                raise TrainingFailed(
                    f"no update of {config.run_dir} was taken: got {step} skipped ones, the last "
                    f"{update.verdict.value}; expected some; nothing was saved; look at the data "
                    "and at health.spike_deviations",
                    on_all_ranks=True,
                )
            due = _is_due(step, config.checkpoint.every_steps) and not update.verdict.is_skipped
            if due or code is not None or (last and config.checkpoint.after_last):
                save(step)
                saved_step = step
            if last:
                code = None  # asked to stop where it ends anyway
            if code is None and (last or _is_due(step, config.validation.every_steps)):
                code = validate(step) if validation_rows is not None else None
        if code is not None and saved_step != step:
            save(step)
        saver.finish()
        profiler.close(step)
        if metrics:
            metrics.sync()
    except TrainingFailed as error:
        if error.on_all_ranks:
            saver.finish()  # of an earlier update, and sound
        raise
    finally:
        watchdog.close()
        if metrics:
            metrics.close()
    if code is None:
        skipped = _skipped(total_steps - engine.updates_taken)
        console.print(f"{config.run_dir} is complete: step {total_steps}/{total_steps}{skipped}")
        return EXIT_COMPLETE
    if world.rank == 0:
        (config.run_dir / STOP_FILE).unlink(missing_ok=True)
    console.print(f"stopped as asked by {reason_of(code)}; start the same command again to go on")
    return code


def _skipped(updates: int) -> str:
    """What is to be added about a run some of whose updates changed nothing."""
    return f"; {updates} of its updates were skipped (verdict in {LOG_NAME})" if updates else ""


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _lacks_validation(config: RunConfig, step: int) -> bool:
    """Whether a run was stopped or killed between the save of this step and its validation."""
    every, last = config.validation.every_steps, step == config.training.total_steps
    if step == 0 or every is None or not (last or _is_due(step, every)):
        return False
    log = config.run_dir / LOG_NAME
    return log.is_file() and not has_validation(log, step)
