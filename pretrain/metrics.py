"""What a run shows: a JSON object per step in log.jsonl, the same in TensorBoard, one log line.

Only rank 0 writes. When a run resumes at step s, everything written beyond s is dropped first, so
log.jsonl and every curve hold each step once, as if the run had never stopped.
"""

import json
import math
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from models.accounting import flops_per_token
from models.checkpoint_directory import write_atomically
from pretrain.config import RunConfig
from pretrain.engine import Update

LOG_NAME = "log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
EVENTS_SUFFIX = ".pretrain"
"""Ends the names of our event files; eval writes files of its own beside them."""

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
        log_path = config.run_dir / LOG_NAME
        events = config.run_dir / TENSORBOARD_FOLDER
        drop_log_lines(log_path, resumed_step)
        drop_events(events, resumed_step)
        self._log = open(log_path, "a", encoding="utf-8")  # noqa: SIM115  # lives as long as the run
        self._tensorboard = SummaryWriter(str(events), filename_suffix=EVENTS_SUFFIX)
        self._flops_per_token = flops_per_token(config.model, config.data.seq_len)
        self._peak_flops = _peak_flops(device) * world_size
        self._step_began = time.perf_counter()
        self._first_step = resumed_step + 1
        self._printed_step = resumed_step
        self._seconds_since_line = 0.0

    def step_begins(self) -> None:
        """Starts the clock of a step; validation and checkpoints lie between steps."""
        self._step_began = time.perf_counter()

    def step_ends(self, step: int, update: Update, learning_rate: float) -> None:
        """Records one update."""
        seconds = time.perf_counter() - self._step_began
        batch_tokens = self.config.batch.batch_tokens
        tokens_per_second = batch_tokens / seconds
        numbers = {
            "loss": update.loss,
            "lr": learning_rate,
            "grad_norm": update.grad_norm,
            "tokens_per_second": round(tokens_per_second, 1),
            "tokens": step * batch_tokens,
            "memory_bytes": _peak_memory_bytes(self.device),
        }
        if self._peak_flops:
            numbers["mfu"] = tokens_per_second * self._flops_per_token / self._peak_flops
        self._write(step, numbers)
        total = self.config.training.total_steps
        self._seconds_since_line += seconds
        if step % self.config.logging.every_steps == 0 or step in (self._first_step, total):
            self._print_line(step, numbers, self._seconds_since_line / (step - self._printed_step))
            self._printed_step = step
            self._seconds_since_line = 0.0

    def validation_ends(self, step: int, loss: float, seconds: float) -> None:
        """Records a validation loss, in nats per token."""
        self._write(step, {"validation_loss": loss})
        self.console.print(
            f"step {step}  validation loss {loss:.4f}  perplexity {math.exp(min(loss, 700)):.2f}  "
            f"({seconds:.1f} s)"
        )

    def sync(self) -> None:
        """Puts everything on disk, so that a checkpoint never lies beyond the log."""
        self._tensorboard.flush()
        self._log.flush()
        os.fsync(self._log.fileno())

    def close(self) -> None:
        self._log.close()
        self._tensorboard.close()

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        now = time.time()
        self._log.write(json.dumps({"step": step, **numbers, "time": round(now, 3)}) + "\n")
        self._log.flush()
        for name, value in numbers.items():
            group = "validation" if name == "validation_loss" else "train"
            self._tensorboard.add_scalar(f"{group}/{name}", value, step, walltime=now)

    def _print_line(self, step: int, numbers: Mapping[str, float], mean_seconds: float) -> None:
        total = self.config.training.total_steps
        tokens_per_second = self.config.batch.batch_tokens / mean_seconds
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
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            writer = RecordWriter(file)
            for record in kept:
                writer.write(record)
        os.replace(temporary, path)


def _peak_flops(device: torch.device) -> float:
    """bf16 FLOP/s of the device; 0 for a CPU or a GPU that the table does not know."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((flops for gpu, flops in PEAK_BF16_FLOPS.items() if gpu in name), 0.0)


def _peak_memory_bytes(device: torch.device) -> int:
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
