"""Run independent tasks in this process or as Ray tasks; what they make are files.

One worker needs no Ray. More run in a private Ray on this machine or, with an address, in a running
cluster (ray_cluster.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from data_prep.ray_cluster import connected

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")

# Below this much work for a single process, starting Ray costs more than it saves.
WORTHWHILE_BYTES = 64 << 20
IN_FLIGHT_PER_WORKER = 4


class Pool:
    """Workers for one command; Ray starts with the first work that needs it.

    Args:
        workers: how many; None decides by the work, or takes what the cluster has.
        address: HOST:PORT of a running Ray cluster, or "auto".
    """

    def __init__(self, workers: int | None, address: str | None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers is too small: got {workers}; expected at least 1")
        self._workers = workers
        self._address = address
        self._ray = ExitStack()
        self._is_connected = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.close()

    def run(
        self,
        function: Callable[[Shared, Job], Result],
        shared: Shared,
        jobs: Sequence[Job],
        work_bytes: int,
    ) -> Iterator[tuple[int, Result]]:
        """Call function(shared, job) for every job; yields (number of the job, result) as they end.

        An error of a task is raised here as it was raised there.
        """
        workers = self._workers
        if workers is None and self._address is None:
            enough = work_bytes >= WORTHWHILE_BYTES
            workers = min(os.cpu_count() or 1, max(1, len(jobs))) if enough else 1
        if workers == 1 and self._address is None:
            for index, job in enumerate(jobs):
                yield index, function(shared, job)
        elif jobs:
            yield from self._run_with_ray(function, shared, jobs, workers)

    def _run_with_ray(
        self,
        function: Callable[[Shared, Job], Result],
        shared: Shared,
        jobs: Sequence[Job],
        workers: int | None,
    ) -> Iterator[tuple[int, Result]]:
        if not self._is_connected:
            # This is the work that the user waits for; Ray would give way to everything else.
            os.environ.setdefault("RAY_worker_niceness", "0")
            cpus = workers or os.cpu_count() or 1
            ray_there = connected(self._address, cpus=cpus, env={}, log_to_driver=False)
            self._ray.enter_context(ray_there)
            self._is_connected = True
        import ray

        workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        task = ray.remote(num_cpus=1)(function)
        shared_ref = ray.put(shared)
        waiting = iter(range(len(jobs)))
        running: dict[Any, int] = {}
        while True:
            while len(running) < workers * IN_FLIGHT_PER_WORKER:
                if (index := next(waiting, None)) is None:
                    break
                running[task.remote(shared_ref, jobs[index])] = index
            if not running:
                return
            done, _ = ray.wait(list(running), num_returns=1)
            index = running.pop(done[0])
            try:
                result = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                brief = str(error).splitlines()[0]
                raise RuntimeError(f"a worker died: {brief}; run the same command again") from None
            yield index, result
