"""The nodes of a launch: an agent on each, found, called, given up and taken back.

A node counts as lost when its agent's process is gone or nothing has come from it for LOST_SECONDS,
long before Ray notices a cut network. An agent gets its next sign of life after it has answered the
last one; without any its lease runs out and it ends its ranks. `fence` returns when that must have
happened, so that no two runs write into one folder.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.cluster import Request
from launch.errors import NodeRefused
from launch.node_agent import News, NodeAgent, Order

LOST_SECONDS = 15.0
LEASE_SECONDS = 15.0
FENCE_SECONDS = LEASE_SECONDS + 2.0
JOIN_SECONDS = 60.0
CALL_SECONDS = 20.0
LAST_CALL_SECONDS = 5.0
"""Where all ends: nobody waits for a node that may be cut off, whose lease ends its ranks."""
LONG_POLL_SECONDS = 1.0
PULSE_SECONDS = 2.0
LOOK_SECONDS = 2.0
"""Between two looks for nodes that have come back."""


@dataclass(eq=False)
class Node:
    """A node of the cluster with our agent on it. `name` is what the user reads."""

    id: str
    address: str
    name: str
    agent: Any
    heard: float = field(default_factory=time.monotonic)
    pulse: Any = None
    """The last sign of life sent to it, not answered yet."""


@dataclass(eq=False)
class _Candidate:
    """A node that is alive, whose agent has not answered yet."""

    node: Node
    answer: Any
    since: float


class Nodes:
    """Agents on the nodes of a connected Ray.

    Args:
        request: what each node must have.
        check: called with a node that came back, and its agent; NodeRefused keeps it out.
        tell: a line for the user.
    """

    def __init__(
        self, request: Request, check: Callable[[Node], None], tell: Callable[[str], None]
    ) -> None:
        self._request = request
        self._check = check
        self._tell = tell
        self._refused: dict[str, str] = {}
        self._candidates: dict[str, _Candidate] = {}
        self._calls: dict[Any, Node] = {}
        self._looked = 0.0
        self.healthy: list[Node] = []
        """In the order of their ranks; those that came back are last."""
        self._closed = threading.Event()
        self._pulse = threading.Thread(target=self._keep_alive, name="pulse", daemon=True)
        self._pulse.start()

    def join(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Puts agents on these nodes (rows of ray.nodes()) and waits until all have answered.

        Raises:
            NodeRefused: one does not.
        """
        import ray

        names = names_of(rows)
        nodes = [self._make(row, names[row["NodeID"]]) for row in rows]
        answers = {node.agent.free_port.remote(None): node for node in nodes}
        deadline = time.monotonic() + JOIN_SECONDS
        while answers:
            left = deadline - time.monotonic()
            ready, _ = ray.wait(list(answers), timeout=max(0.0, min(1.0, left)))
            for answer in ready:
                node = answers.pop(answer)
                try:
                    ray.get(answer)
                except ray.exceptions.RayError as error:
                    raise NodeRefused(
                        node.name, f"cannot start the launcher's agent: {_why(error)}"
                    ) from None
            if answers and left <= 0:
                node = next(iter(answers.values()))
                raise NodeRefused(
                    node.name, f"the launcher's agent does not start within {JOIN_SECONDS:.0f} s"
                )
        now = time.monotonic()
        for node in nodes:
            node.heard = now
        self.healthy = nodes

    def look(self) -> None:
        """Takes in nodes that have come back; call it often, it mostly does nothing."""
        import ray

        now = time.monotonic()
        if len(self.healthy) >= self._request.nodes or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        rows = [row for row in ray.nodes() if row["Alive"] and self._request.fits(row["Resources"])]
        names = names_of(rows)
        here = {node.id for node in self.healthy}
        for row in rows:
            if row["NodeID"] not in here and row["NodeID"] not in self._candidates:
                node = self._make(row, names[row["NodeID"]])
                answer = node.agent.free_port.remote(None)
                self._candidates[node.id] = _Candidate(node, answer, now)
        for candidate in list(self._candidates.values()):
            self._consider(candidate, now)

    def _consider(self, candidate: _Candidate, now: float) -> None:
        """A candidate becomes healthy, goes on waiting, or is given up (and tried again later)."""
        import ray

        ready, _ = ray.wait([candidate.answer], timeout=0)
        node = candidate.node
        if not ready and now - candidate.since < JOIN_SECONDS:
            return
        del self._candidates[node.id]
        try:
            if not ready:
                raise NodeRefused(node.name, "does not answer")
            ray.get(candidate.answer)
            node.heard = now
            self._check(node)
        except (NodeRefused, ray.exceptions.RayError) as error:
            ray.kill(node.agent)
            # Where Ray has an error of its own the node is gone again, or not quite there yet.
            if isinstance(error, NodeRefused) and self._refused.get(node.id) != str(error):
                self._refused[node.id] = str(error)
                self._tell(f"not taken back: {error}")
            return
        if len(self.healthy) < self._request.nodes:
            self._tell(f"node {node.name} is there")
            self.healthy.append(node)
        else:
            ray.kill(node.agent)

    def call(self, node: Node, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """The result of one call of a node's agent.

        Raises:
            NodeRefused: no answer in time.
        """
        import ray

        try:
            result = ray.get(getattr(node.agent, method).remote(*arguments), timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            raise NodeRefused(node.name, _why(error)) from None
        except (ray.exceptions.RayError, TimeoutError):
            self.lose(node)
            raise NodeRefused(node.name, "does not answer any more") from None
        node.heard = time.monotonic()
        return result

    def start(self, orders: Mapping[Node, Sequence[Order]], bind: bool) -> None:
        """Starts ranks. NodeRefused: a node does not answer."""
        self._calls.clear()
        for node, its_orders in orders.items():
            self.call(node, "start", list(its_orders), bind)
            self._ask(node)

    def news(self, seconds: float) -> tuple[list[News], list[Node]]:
        """What came from the nodes that have ranks, and which nodes are lost from now on."""
        import ray

        arrived, lost = [], []
        if not self._calls:
            time.sleep(seconds)
        ready, _ = ray.wait(list(self._calls), timeout=seconds) if self._calls else ([], [])
        for call in ready:
            node = self._calls.pop(call)
            try:
                arrived.append(ray.get(call))
            except ray.exceptions.RayError:
                lost.append(node)
                continue
            node.heard = time.monotonic()
            self._ask(node)
        now = time.monotonic()
        lost += [n for n in self.healthy if now - n.heard > LOST_SECONDS and n not in lost]
        self._calls = {call: node for call, node in self._calls.items() if node not in lost}
        for node in lost:
            self.lose(node)
        return arrived, lost

    def _ask(self, node: Node) -> None:
        self._calls[node.agent.news.remote(LONG_POLL_SECONDS)] = node

    def send(self, number: int) -> None:
        """A signal for every rank."""
        for node in self._calls.values():
            node.agent.send.remote(number)

    def kill_ranks(self, seconds: float = CALL_SECONDS) -> list[Node]:
        """Ends the ranks of all healthy nodes; returns nodes where that is not known to be so in
        that time."""
        import ray

        self._calls.clear()
        answers = {node.agent.kill.remote(): node for node in self.healthy}
        ray.wait(list(answers), num_returns=len(answers), timeout=seconds)
        silent = []
        for answer, node in answers.items():
            try:
                gone = ray.get(answer, timeout=0)
                node.heard = time.monotonic()
            except (ray.exceptions.RayError, TimeoutError):
                gone = False
            if not gone:
                silent.append(node)
        for node in silent:
            self.lose(node)
        return silent

    def lose(self, node: Node) -> None:
        """Gives a node up until a new agent answers from it."""
        import ray

        if node in self.healthy:
            self.healthy.remove(node)
        ray.kill(node.agent)

    def close(self) -> None:
        """Ends every rank and every agent, as far as they can be reached."""
        import ray

        self._closed.set()
        self._pulse.join()  # a call of Ray while it shuts down would crash the process
        self.kill_ranks(LAST_CALL_SECONDS)
        for node in [*self.healthy, *(c.node for c in self._candidates.values())]:
            ray.kill(node.agent)

    def _keep_alive(self) -> None:
        """A sign of life for every agent that has answered the last one, until `close`."""
        import ray

        while not self._closed.wait(PULSE_SECONDS):
            for node in list(self.healthy):
                try:
                    if node.pulse is None or ray.wait([node.pulse], timeout=0)[0]:
                        if node.pulse is not None:
                            ray.get(node.pulse)
                            node.heard = time.monotonic()
                        node.pulse = node.agent.pulse.remote()
                except ray.exceptions.RayError:
                    node.pulse = None  # it is gone, which whoever calls it next will see

    def _make(self, row: Mapping[str, Any], name: str) -> Node:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        request = self._request
        actor = ray.remote(NodeAgent).options(
            num_cpus=0 if request.gpus_per_node else request.workers_per_node,
            num_gpus=request.gpus_per_node,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(row["NodeID"], soft=False),
        )
        address = row["NodeManagerAddress"]
        agent = actor.remote(address, request.gpus_per_node, LEASE_SECONDS)
        return Node(row["NodeID"], address, name, agent)


def fence(lost: Iterable[Node], wait: Callable[[float], None]) -> None:
    """Returns when ranks of these nodes must have ended, since their agents' leases are over."""
    last = max((node.heard for node in lost), default=None)
    if last is not None:
        wait(last + FENCE_SECONDS - time.monotonic())


def names_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the user reads for each node: its address, with a part of the id where two share it."""
    shared = Counter(row["NodeManagerAddress"] for row in rows)
    return {
        row["NodeID"]: row["NodeManagerAddress"]
        if shared[row["NodeManagerAddress"]] == 1
        else f"{row['NodeManagerAddress']} ({row['NodeID'][:6]})"
        for row in rows
    }


def _why(error: BaseException) -> str:
    """Ray's errors hold a stack of several processes; the cause is their last line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if lines else type(cause).__name__
