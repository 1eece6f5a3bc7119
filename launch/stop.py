"""Ctrl-C, SIGTERM and Slurm's SIGUSR1: ask the ranks for a checkpoint before everything ends.

start-up, between two starts   the launcher ends at once
while ranks run                they get the signal, save and end; a second one ends at once
while it ends                  nothing: everything is being ended already
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from launch.descendants import end_all
from launch.errors import LaunchFailed

CLEAN_UP_SECONDS = 12.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """A signal ends the launcher. Of a kind that no library on the way takes for its own error."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


class StopRequest:
    """What signals do, from its making until the process ends or `restore`.

    Args:
        seconds: how long the ranks get to finish a step and save.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.signal: int | None = None
        self.graceful = False
        """Whether there are ranks that can save: the first signal is then theirs."""
        self.ending = False
        """Whether everything is being ended: no signal may keep that from its end."""
        self._deadline = 0.0
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._remember) for number in SIGNALS
        }

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    @property
    def expired(self) -> bool:
        """Whether the ranks have had their time."""
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
        if self.ending:
            return
        if self.requested or not self.graceful:
            self.ending = True
            _end_in(CLEAN_UP_SECONDS, 128 + number)
            raise Interrupted(number)
        self.signal = number
        self._deadline = time.monotonic() + self.seconds
        print(
            f"stopping: up to {self.seconds:.0f} s for a checkpoint; once more ends at once",
            file=sys.stderr,
            flush=True,
        )


def _end_in(seconds: float, code: int) -> None:
    """Ends this process and all below it, should cleaning up not get that far."""

    def end() -> None:
        end_all(spare=set())
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
