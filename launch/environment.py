"""The environment of a rank: torchrun's variables, and what a node needs beside them.

What the user has set, on the launcher's machine or on the node, stays as it is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launch.addresses import interface_of

PASSED_ON = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_LAUNCH_"),
    *("OMP_", "MKL_", "WANDB_", "HF_"),
)
"""Beginnings of names that ranks on every node take over from the launcher's environment."""
NOT_INHERITED = ("RAY_",)
"""Ranks know nothing of Ray; its token least of all."""


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What of the launcher's environment every rank gets."""
    return {name: text for name, text in environment.items() if name.startswith(PASSED_ON)}


def node_variables(address: str, ranks: int, gpus: int, given: Mapping[str, str]) -> dict[str, str]:
    """What a node adds for its ranks, where `given` and its own environment do not say it.

    Args:
        address: of this node in the cluster; collectives use its interface.
        ranks, gpus: on this node.
        given: from the launcher.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks)),
        # On a disk of the node: ranks of many nodes that compile into one shared folder wait for
        # each other's locks, and some shared file systems have none.
        "TRITON_CACHE_DIR": str(Path(tempfile.gettempdir(), f"triton-cache-{os.getuid()}")),
    }
    if interface := interface_of(address):
        wanted["GLOO_SOCKET_IFNAME"] = interface
        if gpus and interface != "lo":
            wanted["NCCL_SOCKET_IFNAME"] = interface
    if gpus:
        wanted["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # a lost peer ends a rank
    # Ray sets OMP_NUM_THREADS for its own workers; that is nobody's wish.
    has = {**os.environ, **given}
    if "OMP_NUM_THREADS" not in given:
        has.pop("OMP_NUM_THREADS", None)
    chosen = {name: has.get(name, value) for name, value in wanted.items()}
    if not gpus:
        chosen["CUDA_VISIBLE_DEVICES"] = ""
    return chosen


def rank_environment(node: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a rank on this node."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return {**own, "PYTHONUNBUFFERED": "1", **given, **node}
