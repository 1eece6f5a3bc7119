"""A Ray cluster that can hold one launch: data_prep/ray_cluster.py's, with what is asked of it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from data_prep.ray_cluster import connected as ray_connected
from data_prep.ray_cluster import set_environment
from launch.descendants import no_survivors

HEAD_RESOURCE = "node:__internal_head__"
IN_USE_SECONDS = 10.0


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

    @property
    def kind(self) -> str:
        return "GPU" if self.gpus_per_node else "CPU"

    def amount(self, resources: Mapping[str, float]) -> int:
        """How much there is of what is asked for."""
        return int(resources.get(self.kind, 0))

    def fits(self, resources: Mapping[str, float]) -> bool:
        """Whether a node with these can hold its part."""
        return self.amount(resources) >= self.workers_per_node


def choose_nodes(
    request: Request,
    rows: Sequence[Mapping[str, Any]],
    free: Callable[[], Mapping[str, Mapping[str, float]]],
) -> list[Mapping[str, Any]]:
    """The nodes (rows of ray.nodes()) that hold a request, the head first.

    Args:
        free: what is not in use, by node; asked for a while, since a job that has just ended may
            still hold its part.

    Raises:
        ValueError: the cluster is too small, or in use.
    """
    alive = [row for row in rows if row["Alive"]]
    fitting = [row for row in alive if request.fits(row["Resources"])]
    fitting.sort(key=lambda row: (HEAD_RESOURCE not in row["Resources"], row["NodeManagerAddress"]))
    least = f"{request.nodes} with at least {request.workers_per_node}"
    if len(fitting) < request.nodes:
        nodes = _listed(request, alive, {row["NodeID"]: row["Resources"] for row in alive})
        raise ValueError(
            f"the cluster is too small: got {len(alive)} nodes ({request.kind}s: {nodes}); "
            f"expected {least}; ask for less or add nodes"
        )
    deadline = time.monotonic() + IN_USE_SECONDS
    while True:
        unused = free()
        ready = [row for row in fitting if request.fits(unused.get(row["NodeID"], {}))]
        if len(ready) >= request.nodes:
            return ready[: request.nodes]
        if time.monotonic() > deadline:
            raise ValueError(
                f"the cluster is in use: got {len(fitting)} nodes with free {request.kind}s: "
                f"{_listed(request, fitting, unused)}; expected {least}; wait or ask for less"
            )
        time.sleep(0.5)


def _listed(
    request: Request,
    rows: Sequence[Mapping[str, Any]],
    resources: Mapping[str, Mapping[str, float]],
) -> str:
    each = (
        f"{row['NodeManagerAddress']} has {request.amount(resources.get(row['NodeID'], {}))}"
        for row in rows
    )
    return ", ".join(each)


@contextmanager
def cluster(request: Request, address: str | None) -> Iterator[list[Mapping[str, Any]]]:
    """Inside, Ray is connected and can hold `request`. Yields the rows of ray.nodes() to use.

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
        # Where memory is short Ray would end an agent, since it knows no rank; all ranks with it.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    cpus = max(request.workers, os.cpu_count() or 1)
    ours = no_survivors() if address is None else nullcontext()
    # Ray's workers, and what they start, would give way to everything else.
    env = {"RAY_worker_niceness": "0"}
    with ours, ray_connected(address, cpus=cpus, env=env, log_to_driver=False):
        import ray

        # What Ray itself has to say of lost nodes and actors is said by us, in one line.
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        ray._private.worker._worker_logs_enabled = False
        from ray._private.state import available_resources_per_node

        yield choose_nodes(request, ray.nodes(), available_resources_per_node)


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
