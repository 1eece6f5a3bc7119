"""Which processors each rank of a node runs on: those near its GPU, shared evenly."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


def cpus_of_ranks(ranks: int) -> list[list[int] | None]:
    """Processors of every local rank; None where it may use all.

    Ranks whose GPUs hang on the same processors share these; ranks without a GPU, or whose GPU's
    place is unknown, share all.
    """
    allowed = sorted(os.sched_getaffinity(0))
    near = [set(allowed) & cpus or set(allowed) for cpus in _near_gpus(ranks, set(allowed))]
    return shares([sorted(cpus) for cpus in near])


def shares(near: Sequence[Sequence[int]]) -> list[list[int] | None]:
    """Splits each set of processors among the ranks that name it, where it is large enough."""
    ranks_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, cpus in enumerate(near):
        ranks_of[tuple(cpus)].append(rank)
    found: list[list[int] | None] = [None] * len(near)
    for cpus, ranks in ranks_of.items():
        if len(cpus) < len(ranks):
            continue
        for place, rank in enumerate(ranks):
            begin, end = (len(cpus) * i // len(ranks) for i in (place, place + 1))
            found[rank] = list(cpus[begin:end])
    return found


def _near_gpus(ranks: int, everything: set[int]) -> list[set[int]]:
    gpus = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    if len(gpus) < ranks:
        return [everything] * ranks
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        rows = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return [everything] * ranks
    places: dict[str, str] = {}
    for row in rows.stdout.splitlines():
        index, uuid, bus = (cell.strip() for cell in row.split(","))
        places[index] = places[uuid] = bus.lower()[-12:]  # sysfs has four digits of the domain
    near = []
    for gpu in gpus[:ranks]:
        try:
            listed = (PCI_DEVICES / places.get(gpu, "unknown") / "local_cpulist").read_text()
        except OSError:
            listed = ""
        near.append(parse_cpu_list(listed) or everything)
    return near


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's notation: 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found |= set(range(int(first), int(last or first) + 1))
    return found
