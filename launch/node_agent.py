"""The launcher's hand on a node: a Ray actor that starts the ranks there, as torchrun would.

It holds the node's GPUs and CPUs, so Ray gives them to nobody else and all ranks of the node see
all of them. Ranks are plain processes: they get signals, have exit codes, and write to a pipe that
goes to a file of the run folder and to the launcher. They never outlive the agent (launch/rank.py),
and the agent ends them when it has heard nothing from the launcher for a while: a node that is cut
off stops training before the launcher starts the run elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from launch.addresses import free_port, reaches
from launch.binding import cpus_of_ranks
from launch.environment import node_variables, rank_environment
from launch.first_error import FirstError
from launch.probe import probe
from launch.rank import ANY_CPU

KEPT_LINES = 5000
DRAIN_SECONDS = 2.0
KILL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """One rank to start: `python -m module *arguments` in a folder.

    environment: what differs from the environment of the node's other processes.
    log: file that its output is appended to, begun by the line `title`; None keeps none.
    """

    rank: int
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str
    log: str | None
    title: str = ""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit code as subprocess has it (-9: SIGKILL), and what it complained of."""

    rank: int
    code: int
    message: str


@dataclass
class News:
    """What happened since the launcher asked last."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


class NodeAgent:
    """Starts, watches and ends the ranks of one node.

    Args:
        address: of this node.
        gpus: on this node that are ours.
        lease_seconds: after so long without a call, ranks and agent end.
    """

    def __init__(self, address: str, gpus: int, lease_seconds: float) -> None:
        self._address = address
        self._gpus = gpus
        self._lease_seconds = lease_seconds
        self._heard = time.monotonic()
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, str]] = deque(maxlen=KEPT_LINES)
        self._ended: list[Ended] = []
        self._kills = 0
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._node: dict[str, str] = {}
        threading.Thread(target=self._end_with_the_lease, daemon=True).start()

    def pulse(self) -> None:
        """The launcher lives."""
        self._heard = time.monotonic()

    def describe(
        self, ranks: int, bind: bool, given: dict[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Processors of each rank, as text, and what the node adds to the environment of all."""
        self._heard = time.monotonic()
        bindings = [_text(cpus) for cpus in (cpus_of_ranks(ranks) if bind else [None] * ranks)]
        return bindings, node_variables(self._address, ranks, self._gpus, given)

    def probe(self, question: dict[str, object]) -> dict[str, object]:
        """What launch/probe.py finds on this node."""
        self._heard = time.monotonic()
        return probe(question)

    def free_port(self, wanted: int | None) -> int:
        """`wanted`, or 0 if it is taken; without a wish one that is free."""
        self._heard = time.monotonic()
        return free_port(wanted)

    def reaches(self, host: str, port: int, seconds: float) -> str | None:
        """None, or why a connection from this node to host:port fails."""
        self._heard = time.monotonic()
        return reaches(host, port, seconds)

    def start(self, orders: Sequence[Order], bind: bool) -> None:
        """Starts the ranks of this node; news tell how they fare."""
        self._heard = time.monotonic()
        cpus = cpus_of_ranks(len(orders)) if bind else [None] * len(orders)
        self._node = node_variables(self._address, len(orders), self._gpus, orders[0].environment)
        self._threads = [
            threading.Thread(target=self._run, args=(order, binding), daemon=True)
            for order, binding in zip(orders, cpus, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def news(self, wait_seconds: float) -> News:
        """Lines and ends since the last call; waits for some."""
        self._heard = time.monotonic()
        with self._changed:
            asked = self._kills
            self._changed.wait_for(
                lambda: self._lines or self._ended or self._kills != asked, wait_seconds
            )
            if self._kills != asked:  # of ranks that are gone; what comes now is not for this call
                return News()
            news = News(list(self._lines), list(self._ended))
            self._lines.clear()
            self._ended.clear()
        return news

    def send(self, number: int) -> None:
        """Sends a signal to every rank that lives."""
        self._heard = time.monotonic()
        for process in self._living():
            process.send_signal(number)

    def kill(self) -> bool:
        """Ends every rank at once; returns whether all are gone."""
        self._heard = time.monotonic()
        deadline = time.monotonic() + KILL_SECONDS
        self._kill()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._kills += 1
            self._lines.clear()
            self._ended.clear()
            self._changed.notify_all()
        return not any(thread.is_alive() for thread in self._threads)

    def _kill(self) -> None:
        for process in self._living():
            _kill_group(process.pid)

    def _living(self) -> list[subprocess.Popen[bytes]]:
        with self._changed:
            return [process for process in self._running.values() if process.returncode is None]

    def _run(self, order: Order, cpus: Sequence[int] | None) -> None:
        """The life of a rank. In a thread of its own, which the rank does not outlive."""
        command = [sys.executable, "-m", "launch.rank", str(os.getpid()), _text(cpus)]
        first = FirstError()
        try:
            log = _open_log(order)
            process = subprocess.Popen(
                [*command, order.module, *order.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=order.working_directory,
                env=rank_environment(self._node, order.environment),
                start_new_session=True,
            )
        except OSError as error:
            self._tell_end(Ended(order.rank, 1, f"cannot start: {error}"))
            return
        with self._changed:
            self._running[order.rank] = process
        reader = threading.Thread(target=self._read, args=(order.rank, process, log, first))
        reader.daemon = True
        reader.start()
        code = process.wait()
        _kill_group(process.pid)  # what it left behind would hold the pipe, and memory
        reader.join(DRAIN_SECONDS)
        self._tell_end(Ended(order.rank, code, first.message))

    def _read(
        self, rank: int, process: subprocess.Popen[bytes], log: BinaryIO | None, first: FirstError
    ) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            if log is not None:
                log.write(raw)
            line = raw.decode(errors="replace").rstrip("\n")
            if first.feed(line):
                with self._changed:
                    self._lines.append((rank, line))
                    self._changed.notify_all()
        if log is not None:
            log.close()

    def _tell_end(self, ended: Ended) -> None:
        with self._changed:
            self._running.pop(ended.rank, None)
            self._ended.append(ended)
            self._changed.notify_all()

    def _end_with_the_lease(self) -> None:
        while time.monotonic() - self._heard < self._lease_seconds:
            time.sleep(0.5)
        self._kill()
        os._exit(1)


def _text(cpus: Sequence[int] | None) -> str:
    return ",".join(map(str, cpus)) if cpus else ANY_CPU


def _open_log(order: Order) -> BinaryIO | None:
    if order.log is None:
        return None
    Path(order.log).parent.mkdir(parents=True, exist_ok=True)
    log = open(order.log, "ab", buffering=0)  # noqa: SIM115  # lives as long as the rank
    log.write(f"{order.title}\n".encode())
    return log


def _kill_group(pid: int) -> None:
    """A rank leads a process group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
