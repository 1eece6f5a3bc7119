"""Several "hosts" on this machine, each with a Ray node: a head that trains nothing, and others.

Where this process may, a host is a network namespace with an address of its own on a bridge, so its
network can be cut; elsewhere all share the machine's address.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from data_prep.ray_cluster import ROOT

START_SECONDS = 180
OBJECT_STORE_BYTES = 80_000_000  # Ray takes no less


def namespaces_allowed() -> bool:
    """Whether network namespaces can be made here."""
    if shutil.which("ip") is None or os.getuid() != 0:
        return False
    name = f"fenwick-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return False
    link = ["ip", "-n", name, "link", "add", "x", "type", "veth", "peer", "name", "y"]
    linked = subprocess.run(link, capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return linked.returncode == 0


class Hosts:
    """A Ray cluster of hosts.

    Args:
        names: of the hosts beside the head.
        cpus: that each of them offers.
        dashboard: whether the head has one; Ray's jobs need it.
    """

    def __init__(self, names: tuple[str, ...], cpus: int, dashboard: bool = False) -> None:
        self.separate = namespaces_allowed()
        self.cpus = cpus
        self.folder = Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))  # short: it holds sockets
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # these addresses have no names
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._tag = f"fw{os.getpid()}"
        self._networks: list[str] = []
        self._addresses: dict[str, str] = {}
        if self.separate:
            self._network("switch")
            self._inside("switch", "ip", "link", "add", "bridge", "type", "bridge")
            self._inside("switch", "ip", "link", "set", "bridge", "up")
            for number, name in enumerate(("head", *names), start=1):
                self._connect(name, number)
        port = self._port()
        host = self._addresses.get("head") or _address_of_this_machine()
        self.address = f"{host}:{port}"
        self._start(
            "head", ["--head", f"--port={port}", "--num-cpus=0", f"--include-dashboard={dashboard}"]
        )
        self._wait_for(1)
        for name in names:
            self.join(name)

    def join(self, name: str, python: str | None = None) -> None:
        """Starts the Ray node of a host, by another python if there is one."""
        alive = sum(node.poll() is None for node in self.nodes.values())
        self._start(name, [f"--address={self.address}", f"--num-cpus={self.cpus}"], python)
        self._wait_for(alive + 1)

    def kill(self, name: str) -> None:
        """Kills every process of a host at once."""
        node = psutil.Process(self.nodes[name].pid)
        family = [node, *node.children(recursive=True)]
        for process in family:
            process.suspend()  # nobody starts anything any more
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=60)
        self.nodes[name].wait()

    def cut(self, name: str) -> None:
        """From now on nothing gets to a host or out of it, and nobody is told."""
        self._inside("switch", "ip", "link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """The network is back; a Ray node that then learns that it was given up starts anew."""
        self._inside("switch", "ip", "link", "set", f"to-{name}", "up")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self.nodes[name].poll() is not None:
                self.join(name)
                return
            time.sleep(0.2)

    def ranks(self, name: str) -> dict[int, psutil.Process]:
        """The processes of `python -m pretrain` on a host."""
        found = {}
        for process in psutil.Process(self.nodes[name].pid).children(recursive=True):
            try:
                words = process.cmdline()
                if "pretrain" in words and "-m" in words and "launch.rank" not in words:
                    found[int(process.environ()["RANK"])] = process
            except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
                continue
        return found

    def launch(self, *arguments: object) -> subprocess.Popen[str]:
        """`python -m launch *arguments` on the head."""
        return subprocess.Popen(
            [*self._at("head"), sys.executable, "-m", "launch", *map(str, arguments)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        for name in list(self.nodes):
            if self.nodes[name].poll() is None:
                self.kill(name)
        for name in self._networks:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False)
            for pid in pids.stdout.split():  # whose parents were gone before them
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, arguments: list[str], python: str | None = None) -> None:
        own = [f"--node-ip-address={self._addresses[name]}"] if self.separate else []
        command = [*self._at(name), python or sys.executable, "-m", "ray.scripts.scripts", "start"]
        command += ["--block", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        with open(self.folder / f"{name}.log", "wb") as log:
            self.nodes[name] = subprocess.Popen(
                [*command, *own, *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_for(self, count: int) -> None:
        """Returns when so many nodes say that they run."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if sum(bool(self._raylets(name)) for name in self.nodes) >= count:
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text() for path in self.folder.glob("*.log"))
        raise TimeoutError(f"the hosts do not start:\n{logs[-4000:]}")

    def _raylets(self, name: str) -> list[psutil.Process]:
        if self.nodes[name].poll() is not None:
            return []
        if "Ray runtime started" not in (self.folder / f"{name}.log").read_text():
            return []
        children = psutil.Process(self.nodes[name].pid).children(recursive=True)
        return [c for c in children if c.name() == "raylet" and c.status() != "zombie"]

    def _port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def _network(self, name: str) -> None:
        full = f"{self._tag}-{name}"
        subprocess.run(["ip", "netns", "add", full], check=True)
        self._networks.append(full)
        self._inside(name, "ip", "link", "set", "lo", "up")

    def _connect(self, name: str, number: int) -> None:
        self._network(name)
        self._addresses[name] = f"10.77.0.{number}"
        switch = f"{self._tag}-switch"
        pair = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", f"to-{name}"]
        self._inside(name, *pair, "netns", switch)
        self._inside("switch", "ip", "link", "set", f"to-{name}", "master", "bridge", "up")
        self._inside(name, "ip", "addr", "add", f"{self._addresses[name]}/24", "dev", "eth0")
        self._inside(name, "ip", "link", "set", "eth0", "up")

    def _inside(self, name: str, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", f"{self._tag}-{name}", *command], check=True)

    def _at(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self._tag}-{name}"] if self.separate else []


def _address_of_this_machine() -> str:
    """As Ray finds it; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
