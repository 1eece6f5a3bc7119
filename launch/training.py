"""A launch from its checks to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from launch.cluster import Request, cluster
from launch.environment import passed_on
from launch.nodes import Nodes
from launch.plan import Plan
from launch.preflight import Preflight
from launch.record import Record
from launch.say import tell
from launch.stop import StopRequest
from launch.supervisor import Limits, Supervisor
from pretrain.config import RunConfig, check_batches


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How to launch. `bind`: processors for each rank; `port`: where rank 0 listens."""

    address: str | None
    limits: Limits
    bind: bool
    port: int | None


def check_request(config: RunConfig, request: Request, min_nodes: int) -> None:
    """ValueError where the config cannot run on the processes asked for; no Ray is needed to
    tell."""
    if request.workers < 1:
        raise ValueError(
            "no worker to start: got --gpus-per-node 0 and --cpu-workers 0; expected at least 1; "
            "raise one of them"
        )
    if min_nodes > request.nodes:
        raise ValueError(
            f"--min-nodes is more than --nodes: got {min_nodes}; expected at most {request.nodes}"
        )
    check_batches(config, request.workers)
    device = config.parallel.device
    if device == "cuda" and request.gpus_per_node == 0:
        raise ValueError(
            "parallel.device is cuda but no GPU is asked for: got --gpus-per-node 0; expected at "
            "least 1; raise it or set parallel.device=auto"
        )
    if device == "cpu" and request.gpus_per_node > 0:
        raise ValueError(
            f"parallel.device is cpu but GPUs are asked for: got --gpus-per-node "
            f"{request.gpus_per_node}; expected 0; lower it or set parallel.device=auto"
        )


def train(
    config: RunConfig, argv: Sequence[str], request: Request, choices: Choices, stop: StopRequest
) -> None:
    """Runs `python -m pretrain *argv` on `request.workers` processes until it is complete.

    Raises:
        ValueError: see launch.cluster.cluster and launch.preflight; nothing was started.
        LaunchFailed: training stopped.
    """
    with cluster(request, choices.address) as rows:
        checks = Preflight(config, request, tell)
        checks.check_nodes(rows)
        nodes = Nodes(request, lambda node: checks.check_node(nodes, node), tell)
        try:
            nodes.join(rows)
            checks.check_network(nodes, choices.port)
            plan = Plan(config, argv, request, bind=choices.bind, port=choices.port)
            for line in describe(nodes, request, choices.bind):
                tell(line)
            record = Record(plan.run_dir)
            try:
                Supervisor(plan, nodes, choices.limits, stop, record, tell).run()
            except KeyboardInterrupt:
                record.ended("stopped")
                raise
        finally:
            stop.ending = True
            nodes.close()


def describe(nodes: Nodes, request: Request, bind: bool) -> list[str]:
    """A line for every node: its ranks, their processors, and the environment they get."""
    lines = []
    given = passed_on(os.environ)
    for place, node in enumerate(nodes.healthy):
        each = request.workers_per_node
        bindings, variables = nodes.call(node, "describe", each, bind, given)
        first, last = place * each, place * each + each - 1
        ranks = f"rank {first}" if each == 1 else f"ranks {first}-{last}"
        cpus = f", CPUs {' | '.join(bindings)}" if bind else ""
        shown = " ".join(f"{k}={v}" for k, v in sorted({**given, **variables}.items()))
        lines.append(f"node {node.name}: {ranks}{cpus}; {shown}")
    return lines
