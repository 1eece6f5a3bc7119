"""What a run shows: a JSON object per step in log.jsonl, the same in TensorBoard, one log line.

Only rank 0 writes. When a run resumes at step s, everything written beyond s is dropped first, so
log.jsonl and every curve hold each step once, as if the run had never stopped.
"""

import hashlib
import json
import math
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from models.accounting import flops_per_token, hardware_flops_per_token
from models.lambda_maps import draw_maps
from pretrain.batch_plan import BatchPlan
from pretrain.config import RunConfig
from pretrain.curves import EVENTS_SUFFIX, drop_events, drop_log_lines
from pretrain.engine import Update
from pretrain.errors import TrainingFailed
from pretrain.statistics import Statistics

LOG_NAME = "log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

WRITERS = ("tensorboard.summary.writer.event_file_writer",)

# Dense bf16 FLOP/s, from the vendor's data sheets.
PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


class Metrics:
    """Writes the numbers of a run.

    Args:
        config: the run.
        world_size: number of ranks; each is a device of its own.
        device: this rank's device.
        resumed_step: step that the run goes on from; what was written beyond it is dropped.
        console: where log lines go.
    """

    def __init__(
        self,
        config: RunConfig,
        world_size: int,
        device: torch.device,
        resumed_step: int,
        console: Console,
    ) -> None:
        self.config = config
        self.device = device
        self.console = console
        self.plan = BatchPlan(config)
        self._wandb = _wandb_run(config)
        log_path = config.run_dir / LOG_NAME
        events = config.run_dir / TENSORBOARD_FOLDER
        drop_log_lines(log_path, resumed_step)
        drop_events(events, resumed_step)
        is_new = not any(events.glob(f"*{EVENTS_SUFFIX}"))
        self._log = open(log_path, "a", encoding="utf-8")  # noqa: SIM115  # lives as long as the run
        threading.excepthook = thread_ended
        self._tensorboard = SummaryWriter(str(events), filename_suffix=EVENTS_SUFFIX)
        if is_new:
            self._write_settings()
        self._peak_flops = peak_flops(device) * world_size
        self._step_began = time.perf_counter()
        self._cpu_time = time.process_time()
        self._first_step = resumed_step + 1
        self._printed_step = resumed_step
        self._seconds_since_line = 0.0
        self._tokens_since_line = 0
        self._bar = _progress_bar(config, console)

    def step_begins(self) -> None:
        """Starts the clock of a step; validation and checkpoints lie between steps."""
        self._step_began = time.perf_counter()

    def step_ends(
        self,
        step: int,
        update: Update,
        learning_rate: float,
        seconds_by_phase: Mapping[str, float],
        rows: Sequence[int],
    ) -> None:
        """Records one update, which read these rows over all ranks."""
        seconds = time.perf_counter() - self._step_began
        tokens = self.plan.tokens(step)
        numbers: dict[str, Any] = {
            "loss": update.loss,
            "lr": learning_rate,
            "grad_norm": update.grad_norm,
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens": self.plan.tokens_until(step),
            "memory_bytes": peak_memory_bytes(self.device),
            "seconds": seconds,
            "cpu_seconds": self._cpu_seconds(),
        }
        numbers |= {f"seconds/{phase}": value for phase, value in seconds_by_phase.items()}
        numbers |= {f"grad_norm/{name}": norm for name, norm in update.group_norms.items()}
        if self.config.batch.stages:
            numbers |= {"batch_tokens": tokens, "seq_len": self.plan.stage(step).seq_len}
        if self._peak_flops:
            numbers |= self._utilisation(step, tokens / seconds)
        texts: dict[str, Any] = {"rows": rows_hash(rows)}
        if update.verdict.is_skipped:
            texts |= {"verdict": update.verdict.value, "row_ids": list(rows)}
        self._write(step, numbers, texts)
        self._seconds_since_line += seconds
        self._tokens_since_line += tokens
        total = self.config.training.total_steps
        if self._bar is not None:
            loss = f"{update.loss:.4f}"
            self._bar.update(self._bar.task_ids[0], completed=step, loss=loss)
        if step % self.config.logging.every_steps == 0 or step in (self._first_step, total):
            self._print_line(step, numbers)

    def validation_ends(self, step: int, loss: float, seconds: float) -> None:
        """Records a validation loss, in nats per token."""
        self._write(step, {"validation_loss": loss})
        self.console.print(
            f"step {step}  validation loss {loss:.4f}  perplexity {math.exp(min(loss, 700)):.2f}  "
            f"({seconds:.1f} s)"
        )

    def statistics(self, step: int, seen: Statistics) -> None:
        """Records what the model's memory does (pretrain/statistics.py)."""
        if not (numbers := seen.scalars()):
            return  # softmax attention has neither
        self._write(step, numbers)
        with self._writing():
            if self.config.logging.histograms:
                for name, values in seen.histograms().items():
                    self._tensorboard.add_histogram(f"histograms/{name}", values, step)
            if self.config.logging.lambda_maps:
                for layer in seen.lambdas:
                    tag = f"lambda_map/{layer.layer}"
                    self._tensorboard.add_figure(tag, draw_maps(layer), step)

    def sync(self) -> None:
        """Puts everything on disk, so that a checkpoint never lies beyond the log."""
        with self._writing():
            self._tensorboard.flush()
            self._log.flush()
            os.fsync(self._log.fileno())

    def close(self) -> None:
        """Ends the bar and lets go of the files; what is to be sure of being there is synced."""
        for file in (self._log, self._tensorboard):
            with suppress(OSError):
                file.close()
        if self._bar is not None:
            self._bar.stop()
        if self._wandb is not None:
            self._wandb.finish()

    def _write_settings(self) -> None:
        """The settings, as hyperparameters of the run and as text."""
        settings = self.config.model_dump(mode="json")
        text = json.dumps(settings, indent=2)
        self._tensorboard.add_text("settings", f"```\n{text}\n```", 0)
        chosen = {
            "mixer": str(settings["model"]["mixer"]),
            "peak_lr": self.config.optimizer.peak_lr,
            "batch_tokens": self.config.batch.batch_tokens,
            "seq_len": self.config.data.seq_len,
            "seed": self.config.seed,
        }
        # add_hparams would open a file of its own, and TensorBoard leaves a file for a newer one.
        writer = self._tensorboard._get_file_writer()
        for summary in hparams(chosen, {}):
            writer.add_summary(summary, 0)

    def _cpu_seconds(self) -> float:
        """CPU time of this process since the update before, whatever it was used for."""
        before, self._cpu_time = self._cpu_time, time.process_time()
        return self._cpu_time - before

    def _utilisation(self, step: int, tokens_per_second: float) -> dict[str, float]:
        model, seq_len = self.config.model, self.plan.stage(step).seq_len
        again = self.config.parallel.activation_checkpointing == "full"
        flops = flops_per_token(model, seq_len)
        hardware = hardware_flops_per_token(model, seq_len, recomputes_blocks=again)
        rate = tokens_per_second / self._peak_flops
        return {"mfu": rate * flops, "hfu": rate * hardware}

    def _write(
        self, step: int, numbers: Mapping[str, float], texts: Mapping[str, Any] | None = None
    ) -> None:
        now = time.time()
        # JSON has no number for what is not finite.
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        line = {"step": step, **finite, **(texts or {}), "time": round(now, 6)}
        scalars = {_tag(name): value for name, value in finite.items() if value is not None}
        with self._writing():
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()
            for tag, value in scalars.items():
                self._tensorboard.add_scalar(tag, value, step, walltime=now)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """TrainingFailed in place of the system's refusals, which name no file."""
        try:
            yield
        except OSError as error:
            run_dir = self.config.run_dir
            raise TrainingFailed(
                f"cannot write {run_dir / LOG_NAME} and {run_dir / TENSORBOARD_FOLDER}: "
                f"{error.strerror or error}; the newest complete checkpoint stays; mend that and "
                "start the same command again"
            ) from error

    def _print_line(self, step: int, numbers: Mapping[str, float]) -> None:
        total = self.config.training.total_steps
        mean_seconds = self._seconds_since_line / (step - self._printed_step)
        tokens_per_second = self._tokens_since_line / self._seconds_since_line
        parts = [
            f"step {step}/{total}",
            f"loss {numbers['loss']:.4f}",
            f"lr {numbers['lr']:.2e}",
            f"grad norm {numbers['grad_norm']:.3f}",
            f"{_short(tokens_per_second)} tokens/s",
            f"{_short(numbers['tokens'])} tokens",
            f"{numbers['memory_bytes'] / 2**30:.2f} GiB",
        ]
        if "mfu" in numbers:
            parts.append(f"MFU {100 * numbers['mfu']:.1f} %")
        parts.append(f"{_duration((total - step) * mean_seconds)} left")
        self.console.print("  ".join(parts))
        self._printed_step, self._seconds_since_line, self._tokens_since_line = step, 0.0, 0


def thread_ended(how: threading.ExceptHookArgs) -> None:
    """As Python does, but for TensorBoard's writer: what it meets, its next call raises to us."""
    if not (isinstance(how.exc_value, OSError) and type(how.thread).__module__ in WRITERS):
        threading.__excepthook__(how)


def rows_hash(rows: Sequence[int]) -> str:
    """Tells the rows of two updates apart: 16 hexadecimal digits of the SHA-256 of their ids."""
    return hashlib.sha256(np.asarray(rows, dtype="<i8").tobytes()).hexdigest()[:16]


def _tag(name: str) -> str:
    """The TensorBoard tag of a number: those without a group are train's."""
    if name == "validation_loss":
        return f"validation/{name}"
    return name if "/" in name else f"train/{name}"


def _progress_bar(config: RunConfig, console: Console) -> Progress | None:
    """On a terminal, a bar below the log lines."""
    if not console.is_terminal or console.quiet:
        return None
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    bar.add_task("training", total=config.training.total_steps, loss="")
    bar.start()
    return bar


def check_wandb(config: RunConfig) -> None:
    """ValueError where logging.wandb_project is set and wandb is not installed."""
    if config.logging.wandb_project is None:
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise ValueError(
            f"logging.wandb_project needs wandb: got {config.logging.wandb_project}; expected an "
            "environment with it; pip install wandb, or set logging.wandb_project=null"
        ) from None


def _wandb_run(config: RunConfig) -> Any:
    """A run of Weights & Biases that goes on when this one does; None where none is asked for."""
    project = config.logging.wandb_project
    if project is None:
        return None
    import wandb

    identity = hashlib.sha256(str(config.run_dir.resolve()).encode()).hexdigest()[:16]
    return wandb.init(
        project=project,
        name=config.run_dir.name,
        id=identity,
        resume="allow",
        config=config.model_dump(mode="json"),
    )


def peak_flops(device: torch.device) -> float:
    """bf16 FLOP/s of the device; 0 for a CPU or a GPU that the table does not know."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((flops for gpu, flops in PEAK_BF16_FLOPS.items() if gpu in name), 0.0)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has held: of the GPU, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _short(number: float) -> str:
    """12345 as 12.3k."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    """Coarse on purpose: 45 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
