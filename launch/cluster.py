"""A Ray cluster that can hold one launch: data_prep/ray_cluster.py's, with what is asked of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.ray_cluster import connected as ray_connected
from data_prep.ray_cluster import set_environment


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
        ValueError: the cluster lacks the resources, `nodes` > 1 without an address, or nothing
            answers at `address`.
    """
    if address is None and request.nodes > 1:
        raise ValueError(
            f"one machine cannot be several nodes: got --nodes {request.nodes}; expected 1 without "
            "--address; start Ray on the machines and give --address HOST:PORT"
        )
    if address is None and "ray" in sys.modules:
        raise RuntimeError("ray was imported before the launcher set its environment")
    set_environment(private=address is None)
    if address is None:
        _check_local_gpus(request)
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # print stays print in workers
    # Importing torch and DeepSpeed on a busy machine can take longer than Ray's 60 s.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    env = worker_environment(request, private=address is None)
    cpus = max(request.workers, os.cpu_count() or 1)
    with ray_connected(address, cpus=cpus, env=env) as folder:
        import ray

        check_resources(request, ray.nodes())
        yield folder


def worker_environment(request: Request, private: bool) -> dict[str, str]:
    """Environment variables of every worker, beside those of ray_cluster and Ray Train."""
    env = {}
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
