"""A Ray cluster for one launch: a private one on this machine, or a connection to a running one.

A private cluster listens on loopback only, asks for a token made for this launch, writes its files
to a folder of its own and ends with the launch, whatever ends that. A cluster given by address is
never stopped; only what this launch started there ends.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONNECT_TIMEOUT_SECONDS = 5.0
# Nothing of ours goes through Ray's object store; its default takes 30 % of memory.
OBJECT_STORE_BYTES = 100 << 20
START_ATTEMPTS = 5
PORT_CLASH = "used by other components"
FOLDER_PARENT = Path("/tmp")
FOLDER_PREFIX = "fenwick-ray-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The processes asked for: one per GPU, or `cpu_workers` per node where no GPU is asked for."""

    nodes: int
    gpus_per_node: int
    cpu_workers: int

    @property
    def workers_per_node(self) -> int:
        return self.gpus_per_node or self.cpu_workers

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node


@contextmanager
def cluster(request: Request, address: str | None) -> Iterator[Path | None]:
    """Inside, Ray is connected and can hold `request`. Yields the private cluster's folder or None.

    Args:
        address: HOST:PORT of a running cluster or "auto"; None starts a private one on this
        machine.

    Raises:
        ValueError: the cluster lacks the resources, or `nodes` > 1 without an address.
        ConnectionError: nothing answers at `address`.
    """
    if address is None and request.nodes > 1:
        raise ValueError(
            f"one machine cannot be several nodes: got --nodes {request.nodes}; expected 1 without "
            "--address; start Ray on the machines and give --address HOST:PORT"
        )
    _set_environment(private=address is None)
    import ray  # after the environment: Ray reads it when it is imported

    env = worker_environment(request, private=address is None)
    folder: Path | None = None
    try:
        if address is None:
            # Short: Ray puts sockets in it, and a socket's path may have 107 characters.
            remove_stale_folders()
            prefix = f"{FOLDER_PREFIX}{os.getpid()}-"
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=FOLDER_PARENT))
            _check_local_gpus(request)
            _start_private(request, folder, env)
        else:
            _check_answers(address)
            ray.init(address=address, logging_level=logging.ERROR, runtime_env={"env_vars": env})
        # ray.init put its own handler on SIGTERM, which prints a stack; ours goes back.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        check_resources(request, ray.nodes())
        yield folder
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _start_private(request: Request, folder: Path, env: dict[str, str]) -> None:
    """Starts Ray on this machine, with `env` and its own address in every worker's environment."""
    import ray

    for attempt in range(START_ATTEMPTS):
        # Parts of Ray Train look for "the" cluster of this machine and would meet another one.
        port = _free_port()
        os.environ["RAY_GCS_SERVER_PORT"] = str(port)
        env["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        try:
            ray.init(
                address="local",
                num_cpus=max(request.workers, os.cpu_count() or 1),
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


def remove_stale_folders() -> None:
    """Removes what launches left behind that were killed so hard that they could not."""
    for folder in FOLDER_PARENT.glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).split("-")[0]
        if folder.is_dir() and folder.stat().st_uid == os.getuid() and pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except PermissionError:
                pass  # alive, and another user's: the number is in use again


def worker_environment(request: Request, private: bool) -> dict[str, str]:
    """Environment variables of every worker, beside those that Ray Train sets."""
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    if request.gpus_per_node == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
        threads = max(1, (os.cpu_count() or 1) // request.workers_per_node)
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    if private and sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def check_resources(request: Request, nodes: Sequence[Mapping[str, Any]]) -> None:
    """ValueError where `nodes` (as ray.nodes() lists them) cannot hold `request`."""
    kind = "GPU" if request.gpus_per_node else "CPU"
    have = sorted(
        (int(node["Resources"].get(kind, 0)) for node in nodes if node["Alive"]), reverse=True
    )
    fitting = sum(amount >= request.workers_per_node for amount in have)
    if fitting < request.nodes:
        raise ValueError(
            f"the cluster is too small: got {len(have)} nodes with {have} {kind}s; expected "
            f"{request.nodes} with at least {request.workers_per_node}; ask for less or add nodes"
        )


def _check_local_gpus(request: Request) -> None:
    """Before Ray starts, so that asking for GPUs on a machine without any costs no time."""
    if request.gpus_per_node == 0:
        return
    # Ray's own detection, so that its count and ours cannot differ.
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    have = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    if have < request.gpus_per_node:
        raise ValueError(
            f"not enough GPUs here: got --gpus-per-node {request.gpus_per_node}; expected at most "
            f"{have}; use --gpus-per-node 0 --cpu-workers N to train on the CPU"
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
        raise ConnectionError(
            f"no Ray cluster answers: got {error.strerror or error} at {address}; expected a "
            "running "
            "Ray head; start one with `ray start --head`"
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _set_environment(private: bool) -> None:
    """What Ray reads from the environment, here and in every process that it starts."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # print stays print in workers
    os.environ["RAY_DEDUP_LOGS"] = "0"
    os.environ["RAY_COLOR_PREFIX"] = "0"
    # Workers without GPUs get CUDA_VISIBLE_DEVICES from worker_environment, not from Ray.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Importing torch and DeepSpeed on a busy machine can take longer than Ray's 60 s.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if private:
        if "ray" in sys.modules:
            raise RuntimeError("ray was imported before the launcher set its environment")
        # The one switch that keeps a node on 127.0.0.1: Ray replaces an explicit 127.0.0.1 by the
        # machine's address and then listens on all interfaces.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.pop("RAY_ADDRESS", None)
        # A token for this launch alone, in no file: other users of the machine cannot connect.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
