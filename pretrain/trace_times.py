"""From a trace of torch's profiler: how long collectives took, and how much of that was hidden.

On a GPU a collective is a kernel of NCCL and work is every other kernel. On a CPU a collective is
what gloo's threads do, and work is torch's operators in the threads beside them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True)
class CollectiveTime:
    """Of one rank, in seconds."""

    seconds: float
    """In which at least one collective ran. It includes waiting for ranks that come later."""
    hidden_seconds: float
    """Of these, those in which the rank computed too."""


def collective_time(trace: Path) -> CollectiveTime:
    """Sums up a trace as profile.steps writes it."""
    events = json.loads(trace.read_bytes())["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    if kernels:
        talks = [event for event in kernels if event["name"].startswith("nccl")]
        works = [event for event in kernels if not event["name"].startswith("nccl")]
    else:
        talks = [event for event in timed if event["name"].startswith("gloo:")]
        works = [event for event in timed if event["name"].startswith("aten::")]
        threads = {event["tid"] for event in talks}
        works = [event for event in works if event["tid"] not in threads]
    talking, working = _union(talks), _union(works)
    seconds = sum(end - begin for begin, end in talking) / 1e6
    return CollectiveTime(seconds, _common(talking, working) / 1e6)


def _union(events: Sequence[dict[str, Any]]) -> list[Interval]:
    """When at least one of the events ran, in order, in microseconds."""
    merged: list[Interval] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Length of what two ordered lists of intervals have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
