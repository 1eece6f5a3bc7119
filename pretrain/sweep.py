"""python -m pretrain sweep SWEEP.yaml: a grid of small models, trained and scored.

A file with `task` is about small models on a synthetic task, which this module runs; one with
`config` is about whole training runs (pretrain/training_sweep.py).

    SWEEP_DIR/runs/<run>/result.json    pretrain/sweep_run.py
    SWEEP_DIR/table.md, table.json      pretrain/sweep_table.py; written after every run

Small models are bound by the launching of kernels, so many runs share a GPU: `workers` processes on
each, one run at a time in a process. Started again, complete runs are not run again and broken off
ones go on from their last scoring.
"""

import json
import multiprocessing
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from eval.progress import duration
from models.checkpoint_directory import write_atomically
from pretrain.errors import Refused, Stopped, TrainingFailed
from pretrain.sweep_config import RunSpec, SweepConfig, load_sweep
from pretrain.sweep_file import RUNS_FOLDER, TABLE_NAME, claim, read, read_tree
from pretrain.sweep_run import finished_result, train_run
from pretrain.sweep_table import markdown, summaries
from pretrain.training_sweep import TrainingSweep
from pretrain.training_sweep_run import TrainingSweepRun

STOPPING = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 1.0
WORKERS_PER_GPU = 8


@dataclass
class Sweep:
    """A sweep in progress."""

    config: SweepConfig
    console: Console
    results: dict[RunSpec, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    new: int = 0

    def folder_of(self, spec: RunSpec) -> Path:
        return self.config.sweep_dir / RUNS_FOLDER / spec.key

    def todo(self) -> list[RunSpec]:
        """The runs that are not complete; the others' results are taken."""
        left = []
        for spec in self.config.runs():
            result = finished_result(self.config, spec, self.folder_of(spec))
            if result is None:
                left.append(spec)
            else:
                self.results[spec] = result
        return left

    def note(self, spec: RunSpec, result: dict[str, Any]) -> None:
        """A run has become complete."""
        self.results[spec] = result
        self.new += 1
        self.write_table()
        left = len(self.config.runs()) - len(self.results)
        remaining = duration((time.monotonic() - self.began) / self.new * left)
        accuracy = 100 * (result["last"] or {"accuracy": 0.0})["accuracy"]
        self.console.print(
            f"{spec.key}: {accuracy:.1f} % after {result['steps']} steps, "
            f"{result['seconds']:.0f} s{', diverged' if result['diverged'] else ''}; "
            f"{len(self.results)} of {len(self.config.runs())} runs, {remaining} left"
        )

    def write_table(self) -> None:
        rows = json.dumps(summaries(self.config, self.results), indent=1)
        write_atomically(self.config.sweep_dir / TABLE_NAME, rows.encode())
        text = markdown(self.config, self.results)
        write_atomically(self.config.sweep_dir / "table.md", text.encode())


def load(path: Path, sweep_dir: Path | None = None) -> SweepConfig | TrainingSweep:
    """A sweep of either kind; arguments and errors are those of pretrain.sweep_file.read."""
    if "config" in read_tree(path):
        return read(path, TrainingSweep, sweep_dir)
    return load_sweep(path, sweep_dir)


def run_sweep(
    path: Path, *, sweep_dir: Path | None, device: str, gpus: int, workers: int | None
) -> None:
    """Trains what is left of a sweep and writes its table.

    Args:
        device: auto, cpu or cuda. gpus: how many to use. workers: runs at a time on each GPU, or on
            the CPU; None: 8 small models or one training run on a GPU, 1 on the CPU.

    Raises:
        Refused: something the user has to change, found before any training.
        TrainingFailed: a worker ended before its runs did, or a training run failed.
        Stopped: SIGINT or SIGTERM came; what was done is on disk.
    """
    before: dict[signal.Signals, Any] = {n: signal.signal(n, _stop) for n in STOPPING}
    try:
        _run_sweep(path, sweep_dir, device, gpus, workers)
    except Stopped:
        before = dict.fromkeys(STOPPING, signal.SIG_IGN)  # the process is about to end
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _run_sweep(
    path: Path, sweep_dir: Path | None, device: str, gpus: int, workers: int | None
) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        config = load(path, sweep_dir)
    except (FileNotFoundError, ValueError) as error:
        raise Refused(str(error)) from None
    per_gpu = 1 if isinstance(config, TrainingSweep) else WORKERS_PER_GPU
    devices = _devices(device, gpus, workers, per_gpu)
    lock = claim(config.sweep_dir)
    try:
        if isinstance(config, TrainingSweep):
            TrainingSweepRun(config, devices, console).run()
            text = (config.sweep_dir / "table.md").read_text()
        else:
            sweep = Sweep(config, console)
            _train_what_is_left(sweep, devices)
            text = markdown(config, sweep.results)
    finally:
        os.close(lock)
    console.print(text)
    console.print(f"table: {config.sweep_dir / 'table.md'}")


def _train_what_is_left(sweep: Sweep, devices: list[torch.device]) -> None:
    config, todo = sweep.config, sweep.todo()
    sweep.console.print(
        f"{config.sweep_dir}: {len(config.runs())} runs, {len(sweep.results)} complete; "
        f"{len(devices)} processes on {devices[0].type}"
    )
    if len(devices) == 1:
        for spec in todo:
            sweep.note(spec, train_run(config, spec, sweep.folder_of(spec), devices[0]))
    elif todo:
        _run_processes(sweep, todo, devices)
    sweep.write_table()


def _devices(name: str, gpus: int, workers: int | None, per_gpu: int) -> list[torch.device]:
    """One device for each process; `per_gpu` of them on a GPU unless `workers` says how many."""
    have = torch.cuda.device_count()
    if name not in ("auto", "cpu", "cuda"):
        raise Refused(f"unknown device: got {name}; expected auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not have):
        return [torch.device("cpu")] * (workers or 1)
    if gpus > have:
        raise Refused(
            f"not enough GPUs: got --gpus {gpus}; expected at most {have}; ask for less, or use "
            "--device cpu"
        )
    return [torch.device("cuda", i) for i in range(gpus)] * (workers or per_gpu)


def _run_processes(sweep: Sweep, todo: list[RunSpec], devices: list[torch.device]) -> None:
    """Trains the runs in a process for each device named."""
    spawn = multiprocessing.get_context("spawn")  # CUDA and torch's threads do not survive a fork
    specs, done = spawn.Queue(), spawn.Queue()
    for spec in todo:
        specs.put(spec)
    for _ in devices:
        specs.put(None)
    processes: list[BaseProcess] = [
        spawn.Process(
            target=_work, args=(sweep.config, specs, done, device, len(devices)), daemon=True
        )
        for device in devices[: len(todo)]
    ]
    specs.cancel_join_thread()  # a stopped sweep does not wait for its runs to be taken
    try:
        # Workers inherit the mask: Ctrl-C, which reaches all processes, is for this one to answer.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING[:1])
        for process in processes:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING[:1])
        left = len(todo)
        while left:
            ended = not any(process.is_alive() for process in processes)
            try:
                sweep.note(*done.get(timeout=POLL_SECONDS))
                left -= 1
            except queue.Empty:
                if ended:
                    raise TrainingFailed(
                        f"{left} runs were not finished: every worker has ended; its error stands "
                        "above; start the same command again to go on"
                    ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # a second one changes nothing
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _work(config: SweepConfig, specs: Any, done: Any, device: torch.device, processes: int) -> None:
    """One process: takes runs until there are none. Ends with its parent, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    while (spec := specs.get()) is not None:
        done.put((spec, train_run(config, spec, config.sweep_dir / RUNS_FOLDER / spec.key, device)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # states are on disk, whole
