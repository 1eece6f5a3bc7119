"""Progress of one stage: a rich bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LOG_INTERVAL_SECONDS = 5.0


class Stage:
    """What has been done of one stage, and how fast.

    Rates count the work of this process, not what a killed one had done before.
    """

    def __init__(self, label: str, total_bytes: int) -> None:
        self.label = label
        self.total_bytes = total_bytes
        self.bytes = 0
        self.documents = 0
        self.tokens = 0
        self._began = time.monotonic()
        self._last_line = self._began
        self._bar: Progress | None = None

    def advance(self, count: int, documents: int = 0, tokens: int = 0) -> None:
        """Add bytes, documents and tokens done."""
        self.bytes += count
        self.documents += documents
        self.tokens += tokens
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.bytes, rates=self.rates())
        elif time.monotonic() - self._last_line >= LOG_INTERVAL_SECONDS:
            self._last_line = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return max(time.monotonic() - self._began, 1e-9)

    def line(self) -> str:
        """`label: done of total MB, rates, time left`."""
        done = f"{self.bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} MB"
        return f"{self.label}: {done}, {self.rates()}"

    def rates(self) -> str:
        """`documents/s, MB/s, tokens/s, time left`; counts of nothing are left out."""
        parts = [f"{self.bytes / self.seconds / 1e6:.2f} MB/s"]
        if self.documents:
            parts.insert(0, f"{self.documents / self.seconds:,.0f} documents/s")
        if self.tokens:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s")
        if self.bytes:
            left = (self.total_bytes - self.bytes) * self.seconds / self.bytes
            parts.append(f"{timedelta(seconds=round(max(left, 0)))} left")
        return ", ".join(parts)


@contextmanager
def stage(label: str, total_bytes: int) -> Iterator[Stage]:
    """A stage that shows itself on stderr while it runs."""
    current = Stage(label, total_bytes)
    if not sys.stderr.isatty():
        yield current
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rates]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(label, total=total_bytes, rates="")
        current._bar = bar
        yield current
