"""Run independent tasks in this process or as Ray tasks. Results are files that the tasks write."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Below this much work for a single process, starting Ray costs more than it saves.
WORTHWHILE_BYTES = 64 << 20
IN_FLIGHT_PER_WORKER = 4


def default_workers(pending_bytes: int) -> int:
    """One worker a processor where the work is long enough for it to pay, else one."""
    return (os.cpu_count() or 1) if pending_bytes >= WORTHWHILE_BYTES else 1


def run_tasks(
    function: Callable[..., None], shared: Any, jobs: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[int]:
    """Call function(shared, *job) for every job; yields each job's index when it is done.

    workers 1 runs here. More start a local Ray, or use the cluster that RAY_ADDRESS names, whose
    machines must see the same files. An error of a task is raised here as it was raised there.
    """
    if workers == 1:
        for index, job in enumerate(jobs):
            function(shared, *job)
            yield index
    elif jobs:
        yield from _run_with_ray(function, shared, jobs, workers)


def _run_with_ray(
    function: Callable[..., None], shared: Any, jobs: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[int]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    started_here = not ray.is_initialized()
    if started_here:
        # Ray's ports listen on every interface; its token authentication, on by default, stays on.
        local: dict[str, Any] = {
            "num_cpus": workers,
            "include_dashboard": False,
            "object_store_memory": 128 << 20,  # holds `shared`; results go through files
        }
        root = str(Path(__file__).resolve().parent.parent)
        ray.init(
            **({} if "RAY_ADDRESS" in os.environ else local),
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": root}},
        )
    try:
        task = ray.remote(num_cpus=1)(function)
        shared_ref = ray.put(shared)
        waiting = iter(range(len(jobs)))
        running: dict[Any, int] = {}
        while True:
            while len(running) < workers * IN_FLIGHT_PER_WORKER:
                if (index := next(waiting, None)) is None:
                    break
                running[task.remote(shared_ref, *jobs[index])] = index
            if not running:
                return
            done, _ = ray.wait(list(running), num_returns=1)
            index = running.pop(done[0])
            try:
                ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                brief = str(error).splitlines()[0]
                raise RuntimeError(f"a worker died: {brief}; run the same command again") from None
            yield index
    finally:
        if started_here:
            ray.shutdown()
