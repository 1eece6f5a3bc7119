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
    to stderr."""
    if sys.stderr.isatty():
        yield from rich_track(
            items, description=what, total=total, console=Console(stderr=True), transient=True
        )
        return
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
