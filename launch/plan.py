"""What the ranks of a launch are: how many, on which nodes, with which command and environment."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.cluster import Request
from launch.environment import passed_on
from launch.node_agent import Order
from launch.nodes import Node, Nodes
from launch.preflight import open_port
from pretrain.config import LOGS_FOLDER, RunConfig, check_batches


class Plan:
    """`python -m pretrain *argv` on the nodes of a request.

    Args:
        config: what argv says.
        argv: the config file and what it is overridden with.
        request: what was asked for.
        bind: whether each rank keeps to processors of its own.
        port: where rank 0 listens; None takes a free one.
    """

    def __init__(
        self,
        config: RunConfig,
        argv: Sequence[str],
        request: Request,
        *,
        bind: bool,
        port: int | None,
    ) -> None:
        self.request = request
        self.run_dir = config.run_dir.resolve()
        self.bind = bind
        self.is_complete = False
        self._config = config
        self._argv = tuple(argv)
        self._port = port

    def usable(self, there: int, least: int) -> int:
        """The most nodes, of those that are there, that the batch divides over; 0: below least."""
        for nodes in range(min(there, self.request.nodes), least - 1, -1):
            if nodes > 0 and self._divides(nodes):
                return nodes
        return 0

    def names(self, nodes: Sequence[Node]) -> list[str]:
        """The node of every rank."""
        return [node.name for node in nodes for _ in range(self.request.workers_per_node)]

    def orders(self, nodes: Sequence[Node], calls: Nodes) -> dict[Node, list[Order]]:
        """The ranks, in the order of the nodes.

        Raises:
            NodeRefused: no port is free on the first node.
        """
        per_node = self.request.workers_per_node
        size = len(nodes) * per_node
        shared = passed_on(os.environ) | {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": str(open_port(calls, self._port)),
        }
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        orders: dict[Node, list[Order]] = {}
        for node_rank, node in enumerate(nodes):
            orders[node] = []
            for local_rank in range(per_node):
                rank = node_rank * per_node + local_rank
                own = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "NODE_RANK": str(node_rank),
                }
                orders[node].append(
                    Order(
                        rank=rank,
                        module="pretrain",
                        arguments=self._argv,
                        environment=shared | own,
                        working_directory=os.getcwd(),
                        log=str(self.log(rank)),
                        title=f"--- {began}: rank {rank} of {size} on node {node.name}",
                    )
                )
        return orders

    def log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.run_dir / LOGS_FOLDER / f"rank-{rank:05d}.log"

    def _divides(self, nodes: int) -> bool:
        try:
            check_batches(self._config, replace(self.request, nodes=nodes).workers)
        except ValueError:
            return False
        return True
