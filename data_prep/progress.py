"""One progress line: a rich bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LOG_INTERVAL_SECONDS = 5.0


@contextmanager
def byte_progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields advance(bytes). Everything goes to stderr."""
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total_bytes)
            yield lambda count: bar.advance(task, count)
        return

    done = 0
    last = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= LOG_INTERVAL_SECONDS:
            last = time.monotonic()
            print(f"{label}: {done / 1e6:.1f} of {total_bytes / 1e6:.1f} MB", file=sys.stderr)

    yield advance
