"""What of Ray's output reaches the user: the lines of the training workers, as they wrote them.

Ray sends every line that any of its processes writes to the launcher's stdout or stderr, as
`(Name pid=123) line`. Its own actors say much that is of no use to the user (placement, process
groups, that the state API is not there, since the dashboard is off) and are left out.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from launch.worker import PREFIX

WORKER = "RayTrainWorker"
_FROM_RAY = re.compile(r"\((?:(?P<actor>\S+) )?pid=\d+(?:, ip=[^)]*)?\) ?(?P<line>.*)")
_CHATTER = "Setting up process group for: "


class WorkerLines(io.TextIOBase):
    """A text stream that passes whole lines on: workers' without Ray's prefix, ours as they are."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._unfinished = ""

    def write(self, text: str) -> int:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            shown = shown_line(line)
            if shown is not None:
                self.stream.write(shown + "\n")
        self.stream.flush()
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typer asks for it before it writes
        return self.stream.encoding


def shown_line(line: str) -> str | None:
    """The line for the user, or None where it is Ray talking to itself."""
    from_ray = _FROM_RAY.fullmatch(line)
    if from_ray is None:
        return line
    # An error line comes back with the worker's end (worker.py) and is the launcher's last line.
    if from_ray["actor"] != WORKER or from_ray["line"].startswith((_CHATTER, PREFIX)):
        return None
    return from_ray["line"]


@contextmanager
def worker_lines_only() -> Iterator[None]:
    """Filters sys.stdout and sys.stderr inside."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = WorkerLines(stdout), WorkerLines(stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
