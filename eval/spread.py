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
from dataclasses import replace
from typing import Any

from data_prep.ray_cluster import connected as ray_connected
from eval.evaluation import EvaluationFailed, Unit, one_line, run_unit
from eval.progress import duration
from eval.result import Result


@contextmanager
def connected(address: str | None, gpus: int, workers: int) -> Iterator[None]:
    """Inside, Ray is there: a private one with so many GPUs or CPUs, or the one at `address`.

    Raises:
        ValueError: the machine or the cluster has fewer, or nothing answers at `address`.
    """
    env = {}
    if not gpus:
        threads = str(max(1, (os.cpu_count() or 1) // workers))
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads)
    cpus = max(gpus, workers, os.cpu_count() or 1)
    with ray_connected(address, cpus=cpus, env=env):
        import ray

        have = int(ray.cluster_resources().get("GPU", 0))
        if gpus > have:
            raise ValueError(
                f"not enough GPUs: got --gpus {gpus}; expected at most {have}; ask for less, or "
                "use --workers N for the CPU"
            )
        yield


def run_spread(
    units: Sequence[Unit], gpus: int, workers: int
) -> Iterator[tuple[Unit, list[Result]]]:
    """Runs the units on a connected Ray, at most `gpus` (or `workers`) at a time; yields each with
    its results as it ends.

    Raises:
        EvaluationFailed: one failed; those that ended before it are done.
    """
    import ray

    resources: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
    remote = ray.remote(max_retries=0, **resources)(_run_there)
    waiting = list(units)
    running: dict[Any, Unit] = {}
    began, done = time.monotonic(), 0
    while waiting or running:
        while waiting and len(running) < (gpus or workers):
            unit = waiting.pop(0)
            sent = replace(unit, device="cuda" if gpus else "cpu")
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
    os.chdir(folder)  # relative paths mean the same as for the user
    try:
        return run_unit(unit), None
    except (OSError, ValueError) as error:
        return [], one_line(error)
    except RuntimeError as error:
        return [], f"evaluation failed: {error}".splitlines()[0]
