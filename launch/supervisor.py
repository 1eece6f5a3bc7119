"""Keeps a run going: starts its ranks, watches them, and starts them again after a fault.

The run folder says where to go on: pretrain itself resumes from its newest complete checkpoint, on
any number of ranks, with the same global batch. So all that a restart needs is a set of nodes.

    killed rank, killed node, silent node        -> the ranks left are ended, then started again
    fewer nodes than asked for, but --min-nodes  -> on as many as the batch divides over
    a node is back                               -> ended after a checkpoint, started on all
    the same error at the same step twice        -> the end
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.errors import LaunchFailed, NodeRefused
from launch.failure import RUN_TIME_FAILURE, USER_ERROR, Failure, cause, is_cause
from launch.node_agent import Ended
from launch.nodes import CALL_SECONDS, LAST_CALL_SECONDS, Node, Nodes, fence
from launch.plan import Plan
from launch.record import Record
from launch.stop import StopRequest
from models.checkpoint_directory import newest_complete

SETTLE_SECONDS, UNCLEAR_SECONDS = 1.0, 4.0
"""After the first bad end: time for the others to say theirs; longer while none is a cause."""
WATCH_SECONDS = 0.5
FULL_SET_SECONDS = 5.0
"""How long a restart on fewer nodes waits for the rest, which may only be starting again."""
LONGEST_PAUSE_SECONDS = 60.0
LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a launch bears.

    max_failures: restarts in all; growing back is none.
    min_nodes: fewest nodes to go on with.
    wait_seconds: longest wait for these after a fault.
    """

    max_failures: int
    min_nodes: int
    wait_seconds: float


class Supervisor:
    """Runs the ranks of a launch until the run is complete.

    Args:
        plan: what each rank is.
        nodes: those that have joined.
        limits: of the launch.
        stop: what signals have asked for.
        record: RUN/logs/launch.json.
        tell: prints a line.
    """

    def __init__(
        self,
        plan: Plan,
        nodes: Nodes,
        limits: Limits,
        stop: StopRequest,
        record: Record,
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._nodes = nodes
        self._limits = limits
        self._stop = stop
        self._record = record
        self._tell = tell
        self._lost: list[Node] = []

    def run(self) -> None:
        """Returns when the run is complete.

        Raises:
            LaunchFailed: it cannot be completed, or a signal stopped it.
        """
        failures, without_progress, last = 0, 0, None
        checkpoint = self._checkpoint()
        while True:
            nodes = self._enough_nodes()
            fence(self._lost, self._wait)
            failure = self._attempt(nodes)
            if failure is None:
                if self._plan.is_complete:
                    self._record.ended("complete")
                    return
                continue  # ended to grow
            if self._stop.requested or failure.is_final:
                self._end(failure)
            if failure.code == USER_ERROR and failures == 0:
                self._end(failure)  # nothing has begun that could have changed
            if failure.repeats(last):
                again = f"{failure.message}\nthe same error came twice at step {failure.step}"
                self._end(Failure(again, failure.code, failure.step, failure.outside))
            if failures == self._limits.max_failures:
                self._end(failure)
            failures, last = failures + 1, failure
            before, checkpoint = checkpoint, self._checkpoint()
            without_progress = 0 if checkpoint != before else without_progress + 1
            pause = min(LONGEST_PAUSE_SECONDS, 2.0**without_progress)
            self._record.failed(failure)
            self._tell(
                f"{failure.message}; restart {failures} of {self._limits.max_failures} from "
                f"{checkpoint or 'the beginning'} in {pause:.0f} s"
            )
            self._wait(pause)

    def _end(self, failure: Failure) -> None:
        self._record.failed(failure)
        self._record.ended("stopped" if failure.is_final else "failed")
        raise LaunchFailed(failure.message, failure.code)

    def _enough_nodes(self) -> list[Node]:
        """The nodes for the next start, or LaunchFailed where there are too few for too long."""
        began = time.monotonic()
        while True:
            self._nodes.look()
            count = self._plan.usable(len(self._nodes.healthy), self._limits.min_nodes)
            waited = time.monotonic() - began
            if count == self._plan.request.nodes or (count and waited > FULL_SET_SECONDS):
                return self._nodes.healthy[:count]
            if waited > self._limits.wait_seconds:
                self._end(
                    Failure(
                        f"too few nodes are left: got {len(self._nodes.healthy)} for "
                        f"{waited:.0f} s; expected {self._limits.min_nodes}; start the same "
                        "command again when they are back, or with a lower --min-nodes",
                        RUN_TIME_FAILURE,
                        last_step(self._plan.run_dir),
                        outside=True,
                    )
                )
            self._wait(WATCH_SECONDS)

    def _attempt(self, nodes: Sequence[Node]) -> Failure | None:
        """Starts the ranks and watches them to their end; None: complete, or ended to grow."""
        self._record.starts(nodes, self._plan.request)
        self._lost = []
        self._stop.graceful = True
        try:
            self._nodes.start(self._plan.orders(nodes, self._nodes), self._plan.bind)
            return self._watch(nodes)
        except NodeRefused as error:
            return Failure(str(error), RUN_TIME_FAILURE, last_step(self._plan.run_dir), True)
        finally:
            self._stop.graceful = False
            patience = LAST_CALL_SECONDS if self._stop.requested else CALL_SECONDS
            self._lost += self._nodes.kill_ranks(patience)

    def _watch(self, nodes: Sequence[Node]) -> Failure | None:
        names = self._plan.names(nodes)
        ended: list[Ended] = []
        began_to_end: float | None = None
        grow_after: str | None = None
        asked = False
        while True:
            arrived, gone = self._nodes.news(WATCH_SECONDS)
            lost = self._lost = [*self._lost, *(node for node in gone if node in nodes)]
            for news in arrived:
                for rank, line in news.lines:
                    self._tell(f"rank {rank}: {line}" if len(names) > 1 else line)
                ended += news.ended
            if self._stop.requested and not asked:
                asked = True
                self._nodes.send(self._stop.for_ranks)
            if len(ended) == len(names) and not any(end.code for end in ended):
                self._plan.is_complete = True
                return None
            bad = [end for end in ended if end.code]
            if began_to_end is None and (bad or lost):
                began_to_end = time.monotonic()
            if self._stop.requested:
                if len(ended) == len(names) or self._stop.expired or lost:
                    return self._stopped(ended)
            elif began_to_end is not None:
                clear = lost or any(is_cause(end) for end in bad)
                patience = SETTLE_SECONDS if clear else UNCLEAR_SECONDS
                if len(ended) == len(names) or time.monotonic() - began_to_end > patience:
                    return self._failure(bad, names)
            elif len(nodes) < self._plan.request.nodes:
                self._nodes.look()
                count = self._plan.usable(len(self._nodes.healthy), self._limits.min_nodes)
                if count > len(nodes) and grow_after is None:
                    grow_after = self._checkpoint()
                    self._tell(f"{count} nodes after the next checkpoint")
                elif count > len(nodes) and self._checkpoint() != grow_after:
                    self._tell(f"growing from {len(nodes)} to {count} nodes")
                    return None
                elif count <= len(nodes):
                    grow_after = None

    def _failure(self, bad: Sequence[Ended], names: Sequence[str]) -> Failure:
        step = last_step(self._plan.run_dir)
        if self._lost:
            which = ", ".join(node.name for node in self._lost)
            return Failure(f"node {which} is lost", RUN_TIME_FAILURE, step, outside=True)
        return cause(bad, names, step)

    def _stopped(self, ended: Sequence[Ended]) -> Failure:
        asked = any(end.code == 128 + self._stop.for_ranks for end in ended)
        saved = asked and self._checkpoint() is not None
        when = "after a checkpoint" if saved else "before its ranks had saved a checkpoint"
        end = self._stop.failure(when)
        return Failure(str(end), end.code, last_step(self._plan.run_dir), outside=True)

    def _checkpoint(self) -> str | None:
        """Name of the newest complete checkpoint, by sizes."""
        folder, _ = newest_complete(self._plan.run_dir, hashes=False)
        return folder.name if folder else None

    def _wait(self, seconds: float) -> None:
        """Sleeps; a signal ends it (launch/stop.py)."""
        time.sleep(max(0.0, seconds))


def last_step(run_dir: Path) -> int:
    """The last step in the run's log, 0 where there is none."""
    try:
        with open(run_dir / "log.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # half a line
    return 0
