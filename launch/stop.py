"""Ctrl-C and SIGTERM: ask the workers for a checkpoint before everything ends.

Ray's workers train in a thread, where no signal arrives; the file RUN/stop reaches them, on any
node that sees the run folder.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from launch.errors import LaunchFailed


class StopRequest:
    """Inside its context the first signal makes the stop file, a second one ends at once.

    Args:
        stop_file: what pretrain looks for after every step.
        seconds: how long the workers get to finish a step and save.
    """

    def __init__(self, stop_file: Path, seconds: float) -> None:
        self.stop_file = stop_file
        self.seconds = seconds
        self.signal: int | None = None
        self._deadline = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = {
            number: signal.signal(number, self._remember)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.stop_file.unlink(missing_ok=True)

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    @property
    def expired(self) -> bool:
        """Whether the workers have had their time."""
        return self.requested and time.monotonic() > self._deadline

    def failure(self, when: str) -> LaunchFailed:
        """What the user reads, with the shell's exit code for the signal."""
        assert self.signal is not None
        return LaunchFailed(
            f"stopped by {signal.Signals(self.signal).name} {when}; start the same command again "
            "to go on from the newest one",
            128 + self.signal,
        )

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            sys.exit(128 + number)
        self.signal = number
        try:
            self.stop_file.touch()
        except OSError:  # there is no run folder yet, so nothing to save
            self._deadline = time.monotonic()
            return
        self._deadline = time.monotonic() + self.seconds
        print(
            f"stopping: up to {self.seconds:.0f} s for a checkpoint; once more ends at once",
            file=sys.stderr,
            flush=True,
        )
