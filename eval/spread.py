"""Units of an evaluation as Ray tasks: on the GPUs of this machine, or of a running cluster.

A cluster's nodes need the repository, the checkpoints and the texts under the same paths
(data_prep/ray_cluster.py). Each unit has one GPU, or one CPU where no GPU is asked for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from data_prep.ray_cluster import connected as ray_connected
from eval.evaluation import EvaluationFailed, Unit, one_line, run_unit
from eval.progress import duration
from eval.result import Result

LOST_MACHINES = 2
"""How often a unit is run again because the process or the machine that ran it is gone."""


@dataclass(frozen=True)
class Places:
    """Where units run: so many at a time, on a GPU each or on a CPU each."""

    gpus: int
    workers: int


@contextmanager
def connected(address: str | None, gpus: int, workers: int) -> Iterator[Places]:
    """Inside, Ray is there: a private one with so many GPUs or CPUs, or the one at `address`.

    Yields what was asked for, or, where nothing was, all GPUs of the cluster, or all its CPUs if it
    has none.

    Raises:
        ValueError: the machine or the cluster has fewer, or nothing answers at `address`.
    """
    cpus = max(gpus, workers, os.cpu_count() or 1)
    with ray_connected(address, cpus=cpus, env={}):
        import ray

        have = ray.cluster_resources()
        have_gpus = int(have.get("GPU", 0))
        if gpus > have_gpus:
            raise ValueError(
                f"not enough GPUs: got --gpus {gpus}; expected at most {have_gpus}; ask for less, "
                "or use --workers N for the CPU"
            )
        if not (gpus or workers):
            gpus, workers = have_gpus, 0 if have_gpus else max(1, int(have.get("CPU", 1)))
        yield Places(gpus, workers)


def run_spread(units: Sequence[Unit], places: Places) -> Iterator[tuple[Unit, list[Result]]]:
    """Runs the units on a connected Ray, each in a place; yields each with its results as it ends.

    A unit whose machine or process is lost runs again elsewhere; its samples are files, so it goes
    on where it was.

    Raises:
        EvaluationFailed: one failed; those that ended before it are done.
    """
    import ray

    options: dict[str, Any] = {"num_gpus": 1}
    if not places.gpus:
        threads = str(max(1, (os.cpu_count() or 1) // places.workers))
        threads = os.environ.get("OMP_NUM_THREADS", threads)
        env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}
        options = {"num_cpus": 1, "runtime_env": {"env_vars": env}}
    remote = ray.remote(max_retries=LOST_MACHINES, **options)(_run_there)
    waiting = list(units)
    running: dict[Any, Unit] = {}
    began, done = time.monotonic(), 0
    while waiting or running:
        while waiting and len(running) < (places.gpus or places.workers):
            unit = waiting.pop(0)
            sent = replace(unit, device="cuda" if places.gpus else "cpu")
            running[remote.remote(sent, os.getcwd())] = unit
            print(f"{unit.task} on {unit.target.model_dir}", file=sys.stderr, flush=True)
        (ready,), _ = ray.wait(list(running), num_returns=1)
        unit = running.pop(ready)
        try:
            results, problem = ray.get(ready)
        except ray.exceptions.RayError as error:
            results, problem = [], str(error).splitlines()[0]
        if problem is not None:
            raise EvaluationFailed(f"{unit.task} on {unit.target.model_dir}: {problem}")
        done += 1
        left = duration((time.monotonic() - began) / done * (len(units) - done))
        print(f"{done} of {len(units)} units, {left} left", file=sys.stderr, flush=True)
        yield unit, results


def _run_there(unit: Unit, folder: str) -> tuple[list[Result], str | None]:
    """In a worker: (results, None), or ([], what went wrong in one line)."""
    try:
        os.chdir(folder)  # relative paths mean the same as for the user
        return run_unit(unit), None
    except (OSError, ValueError) as error:
        problem = one_line(error)
    except RuntimeError as error:
        problem = f"evaluation failed: {error}".splitlines()[0]
    return [], f"{problem} (on {os.uname().nodename})"
