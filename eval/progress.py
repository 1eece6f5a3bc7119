"""Progress of a long loop: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 5.0


def track(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yields `items` unchanged; `total` is how many there will be, `what` names the work. Writes
    to stderr: how many are done, and the time left at the mean speed so far."""
    if sys.stderr.isatty():
        yield from rich_track(
            items, description=what, total=total, console=Console(stderr=True), transient=True
        )
        return
    began = last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last > SECONDS_BETWEEN_LINES:
            last = now
            left = duration((now - began) / done * (total - done))
            print(f"{what}: {done} of {total}, {left} left", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """ "42 s", "3 min 05 s", "2 h 07 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
