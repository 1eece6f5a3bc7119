"""Run independent tasks in this process or as Ray tasks; what they make are files.

One worker needs no Ray. More run in a private Ray on this machine, which listens on loopback only,
asks for a token of its own and ends with the command; or, with an address, in a running cluster
whose machines see the same files under the same paths.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")

# Below this much work for a single process, starting Ray costs more than it saves.
WORTHWHILE_BYTES = 64 << 20
IN_FLIGHT_PER_WORKER = 4
# Holds what all tasks share; results go through files.
OBJECT_STORE_BYTES = 128 << 20
START_ATTEMPTS = 5
PORT_CLASH = "used by other components"
CONNECT_TIMEOUT_SECONDS = 5.0
ROOT = Path(__file__).resolve().parent.parent
FOLDER_PARENT = Path("/tmp")  # short: Ray puts sockets in it, whose paths may have 107 characters
FOLDER_PREFIX = "fenwick-data-"


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
        self._folder: Path | None = None
        self._connected = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connected:
            import ray

            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

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
        if not self._connected:
            on_terminate = signal.getsignal(signal.SIGTERM)
            self._connect(workers)
            if threading.current_thread() is threading.main_thread():
                # Ray put its own handler on SIGTERM, which prints a stack; the old one goes back.
                signal.signal(signal.SIGTERM, on_terminate)
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

    def _connect(self, workers: int | None) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        env = {"PYTHONPATH": str(ROOT)}
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address is not None:
            _check_answers(self._address)
            import ray

            try:
                ray.init(address=self._address, runtime_env={"env_vars": env}, **settings)
            except ConnectionError as error:
                raise ValueError(_no_cluster(str(error), self._address)) from None
            self._connected = True
            return
        if "ray" not in sys.modules:  # Ray reads these when it is imported
            # The one switch that keeps a node on 127.0.0.1.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            # In no file: other users of the machine cannot connect.
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            # This is the work that the user waits for; Ray would give way to everything else.
            os.environ.setdefault("RAY_worker_niceness", "0")
        import ray

        _remove_stale_folders()
        prefix = f"{FOLDER_PREFIX}{os.getpid()}-"
        self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=FOLDER_PARENT))
        for attempt in range(START_ATTEMPTS):
            try:
                ray.init(
                    address="local",
                    num_cpus=workers,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(self._folder),
                    runtime_env={"env_vars": env},
                    **settings,
                )
                self._connected = True
                return
            except ValueError as error:
                # Ray draws free ports at random and refuses its own draw when two parts got one.
                if PORT_CLASH not in str(error) or attempt + 1 == START_ATTEMPTS:
                    raise
                ray.shutdown()


def _no_cluster(found: str, address: str) -> str:
    return (
        f"no Ray cluster answers: got {' '.join(found.split())} at {address}; expected a running "
        "Ray head; start one with `ray start --head`"
    )


def _check_answers(address: str) -> None:
    """A wrong address is refused in seconds; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"--address is no address: got {address}; expected HOST:PORT of a Ray head, or auto"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise ValueError(_no_cluster(error.strerror or str(error), address)) from None


def _remove_stale_folders() -> None:
    """Removes what commands left behind that were killed; never that of one which lives."""
    for folder in FOLDER_PARENT.glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).split("-")[0]
        if folder.is_dir() and folder.stat().st_uid == os.getuid() and pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except PermissionError:
                pass  # alive, and another user's: the number is in use again
