"""Runs what is left of a sweep of training runs: each in processes of its own, several at a time.

    SWEEP_DIR/runs/<run>/           the run's folder, as `python -m pretrain` leaves it
    SWEEP_DIR/runs/<run>/sweep-result.json      what the sweep takes from it, written last
    SWEEP_DIR/logs/<run>.log        what its processes printed
    SWEEP_DIR/table.md, table.json  pretrain/training_sweep_table.py; written after every run

A run that fails does not stop the others; the sweep ends with exit code 1 and its last line.
Stopped, it ends its runs' processes, which save a checkpoint each.
"""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console

from eval.evaluation import targets
from eval.progress import duration
from eval.report import earlier_results
from models.checkpoint_directory import write_atomically
from pretrain.errors import TrainingFailed
from pretrain.sweep_file import TABLE_NAME
from pretrain.training_sweep import TrainingSpec, TrainingSweep
from pretrain.training_sweep_table import markdown, summaries

RESULT_NAME = "sweep-result.json"
ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.2
SAVE_SECONDS = 120.0
"""What a stopped run may take to save its checkpoint before it is killed."""
PR_SET_PDEATHSIG = 1


@dataclass
class Slot:
    """A run in progress on a device: its commands one after the other."""

    spec: TrainingSpec
    device: torch.device
    commands: list[list[str]]
    log: IO[bytes]
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


class TrainingSweepRun:
    """A sweep in progress on `devices`, each of which takes a run at a time."""

    def __init__(
        self, config: TrainingSweep, devices: list[torch.device], console: Console
    ) -> None:
        self.config, self.devices, self.console = config, devices, console
        self.results: dict[TrainingSpec, dict[str, Any]] = {}
        self.failures: dict[TrainingSpec, str] = {}
        for spec in config.runs():
            result = finished_result(config, spec)
            if result is not None:
                self.results[spec] = result

    def run(self) -> None:
        """Everything that is left.

        Raises:
            TrainingFailed: some runs failed.
        """
        todo = [spec for spec in self.config.runs() if spec not in self.results]
        self.console.print(
            f"{self.config.sweep_dir}: {len(self.config.runs())} runs, {len(self.results)} "
            f"complete; {len(self.devices)} at a time on {self.devices[0].type}"
        )
        slots: list[Slot | None] = [None] * len(self.devices)
        began, taken = time.monotonic(), 0
        try:
            while taken < len(todo) or any(slots):
                for place, slot in enumerate(slots):
                    if slot is None and taken < len(todo):
                        slots[place] = self._start(todo[taken], self.devices[place])
                        taken += 1
                    elif slot is not None and not self._goes_on(slot):
                        slots[place] = None
                        done = len(self.results) + len(self.failures)
                        left = len(self.config.runs()) - done
                        made = max(1, taken - sum(s is not None for s in slots))
                        ahead = duration((time.monotonic() - began) / made * left)
                        self.console.print(
                            f"{done} of {len(self.config.runs())} runs, {ahead} left"
                        )
                time.sleep(POLL_SECONDS)
        finally:
            _end([slot for slot in slots if slot is not None])
        self._write_table()
        if self.failures:
            lines = [f"{spec.key} failed: {line}" for spec, line in self.failures.items()]
            raise TrainingFailed("\n".join(lines))

    def _start(self, spec: TrainingSpec, device: torch.device) -> Slot:
        config, folder = self.config, str(self.config.folder_of(spec))
        commands = [["pretrain", str(config.config), *config.overrides(spec)]]
        commands += [["eval", folder, *shlex.split(line)] for line in config.evaluate]
        logs = config.sweep_dir / "logs"
        logs.mkdir(exist_ok=True)
        log = (logs / f"{spec.key}.log").open("ab")
        self.console.print(f"{spec.key}: started; {log.name}")
        process = self._spawn(commands[0], device, log)
        return Slot(spec, device, commands[1:], log, process)

    def _spawn(
        self, command: list[str], device: torch.device, log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        threads = max(1, (os.cpu_count() or 1) // len(self.devices))
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        env |= {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if device.type == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = device.index or 0
            env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process to answer
            preexec_fn=_end_with_parent,  # noqa: PLW1509 (this process has one thread)
        )

    def _goes_on(self, slot: Slot) -> bool:
        """Whether the run is not over; its next command is started where one has ended."""
        status = slot.process.poll()
        if status is None:
            return True
        if status == 0 and slot.commands:
            slot.process = self._spawn(slot.commands.pop(0), slot.device, slot.log)
            return True
        slot.log.close()
        if status:
            line = _last_line(Path(slot.log.name))
            self.failures[slot.spec] = f"exit code {status}: {line}; {slot.log.name}"
            self.console.print(f"{slot.spec.key}: failed: {line}")
            return False
        seconds = time.monotonic() - slot.began
        self.results[slot.spec] = _finish(self.config, slot.spec)
        self._write_table()
        self.console.print(f"{slot.spec.key}: done in {duration(seconds)}")
        return False

    def _write_table(self) -> None:
        rows = json.dumps(summaries(self.config, self.results), indent=1)
        write_atomically(self.config.sweep_dir / TABLE_NAME, rows.encode())
        text = markdown(self.config, self.results)
        write_atomically(self.config.sweep_dir / "table.md", text.encode())


def finished_result(config: TrainingSweep, spec: TrainingSpec) -> dict[str, Any] | None:
    """The result of a complete run, None where it has none with these settings. A run trained with
    other ones is refused by `python -m pretrain` itself."""
    try:
        result = json.loads((config.folder_of(spec) / RESULT_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    same = isinstance(result, dict) and result.get("identity") == config.identity(spec)
    return result if same else None


def _finish(config: TrainingSweep, spec: TrainingSpec) -> dict[str, Any]:
    folder = config.folder_of(spec)
    (target,) = targets([folder], None, all_checkpoints=False)
    entries = earlier_results(target.output, target.described)
    result = {
        "identity": config.identity(spec),
        "model": target.described,
        "results": entries,
    }
    write_atomically(folder / RESULT_NAME, json.dumps(result, indent=1).encode())
    return result


def _end_with_parent() -> None:
    """Asks Linux to end this process when the sweep is killed; it saves a checkpoint then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(slots: list[Slot]) -> None:
    """Ends runs that are under way: each saves a checkpoint."""
    for slot in slots:
        slot.process.terminate()
    deadline = time.monotonic() + SAVE_SECONDS
    for slot in slots:
        try:
            slot.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            slot.process.kill()
            slot.process.wait()
        slot.log.close()


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4096:].decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")
