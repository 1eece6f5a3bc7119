"""Units of an evaluation as Ray tasks: on the GPUs of this machine, or of a running cluster.

A private Ray listens on loopback only, takes a token made for this evaluation and ends with it; a
cluster given by address is left running. Its nodes need the repository, the checkpoints and the
texts under the same paths. Each unit has one GPU, or one CPU where no GPU is asked for.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.evaluation import EvaluationFailed, Unit, one_line, run_unit
from eval.progress import duration
from eval.result import Result

ROOT = Path(__file__).resolve().parent.parent
CONNECT_TIMEOUT_SECONDS = 5.0
OBJECT_STORE_BYTES = 100 << 20
START_ATTEMPTS = 5
PORT_CLASH = "used by other components"
# launch/ removes what is left of a process that was killed by this name.
FOLDER_PREFIX = "fenwick-ray-"


@contextmanager
def connected(address: str | None, gpus: int, workers: int) -> Iterator[None]:
    """Inside, Ray is there: a private one with so many GPUs or CPUs, or the one at `address`.

    Raises:
        ValueError: the machine or the cluster has fewer, or nothing answers at `address`.
    """
    if address not in (None, "auto"):
        _check_answers(address)
    _set_environment(private=address is None)
    import ray  # after the environment: Ray reads it when it is imported

    env = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    if not gpus:
        env |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers))
            ),
        }
    folder: Path | None = None
    try:
        if address is None:
            folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir="/tmp"))
            _start_private(folder, env, max(gpus, workers))
        else:
            try:
                ray.init(
                    address=address, logging_level=logging.ERROR, runtime_env={"env_vars": env}
                )
            except (ConnectionError, ValueError) as error:
                raise ValueError(
                    f"no Ray cluster answers: got --address {address}; expected HOST:PORT of a "
                    f"running Ray head, or auto ({str(error).splitlines()[0]})"
                ) from None
        # ray.init put its own handler on SIGTERM, which prints a stack; ours goes back.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        have = int(ray.cluster_resources().get("GPU", 0))
        if gpus > have:
            raise ValueError(
                f"not enough GPUs: got --gpus {gpus}; expected at most {have}; ask for less, or "
                "use --workers N for the CPU"
            )
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


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


def _check_answers(address: str) -> None:
    """A wrong address is refused in seconds; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"--address is no address: got {address}; expected HOST:PORT of a Ray head, or auto"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"no Ray cluster answers: got --address {address}: {error.strerror or error}; expected "
            "a running Ray head; start one with `ray start --head`"
        ) from None


def _start_private(folder: Path, env: dict[str, str], cpus: int) -> None:
    import ray

    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                num_cpus=max(cpus, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
                runtime_env={"env_vars": env},
            )
            return
        except ValueError as error:
            # Ray draws free ports at random and refuses its own draw when two parts got one port.
            if PORT_CLASH not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            ray.shutdown()


def _set_environment(private: bool) -> None:
    """What Ray reads from the environment, here and in every process that it starts."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS"] = "0"
    os.environ["RAY_COLOR_PREFIX"] = "0"
    # Workers without GPUs get CUDA_VISIBLE_DEVICES from us, not from Ray.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if private:
        # The one switch that keeps a node on 127.0.0.1 (launch/cluster.py says more).
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.pop("RAY_ADDRESS", None)
        # A token for this evaluation alone, in no file: other users cannot connect.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
