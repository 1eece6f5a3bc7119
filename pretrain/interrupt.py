"""What asks a run to save and end, and the exit code that says which it was.

    143  SIGTERM, or the file RUN/stop       138  SIGUSR1 (Slurm's --signal=USR1@300)
    130  SIGINT                              142  training.time_limit_minutes is over

Asked at start-up a run ends before its first update, in an update after it, in an evaluation at the
next micro-batch, in a save after it: within one update and one save.
"""

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

REASONS = {
    signal.SIGTERM: "SIGTERM or RUN/stop",
    signal.SIGINT: "SIGINT",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGALRM: "training.time_limit_minutes",
}
"""In the order of votes; nothing sends SIGALRM, its number stands for the clock."""


class Interrupt:
    """Remembers the first signal that asked to stop; a second one of its kind ends the process.

    In a thread other than the main one (a Ray worker) signals cannot be caught and nothing is
    installed: there the launcher makes the file of `watch`, and so can a user anywhere.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._began = time.monotonic()
        self._limit_seconds: float | None = None
        self._stop_file: Path | None = None
        if threading.current_thread() is threading.main_thread():
            for number in REASONS:
                if number != signal.SIGALRM:
                    signal.signal(number, self._remember)

    def watch(self, stop_file: Path, limit_minutes: float | None) -> None:
        """From now on the existence of this file asks to stop too, and so does the clock."""
        self._stop_file = stop_file
        self._limit_seconds = None if limit_minutes is None else 60 * limit_minutes

    def votes(self) -> list[float]:
        """For every reason in REASONS, whether this rank has it; to be summed over ranks."""
        reason = self.received
        if reason is None and self._stop_file is not None and self._stop_file.exists():
            reason = signal.SIGTERM
        if reason is None and self._limit_seconds is not None:
            over = time.monotonic() - self._began > self._limit_seconds
            reason = signal.SIGALRM if over else None
        return [float(number == reason) for number in REASONS]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)


def exit_code(votes: Sequence[float]) -> int | None:
    """The exit code that the votes of all ranks ask for; None: go on."""
    for number, count in zip(REASONS, votes, strict=True):
        if count > 0:
            return 128 + number
    return None


def reason_of(code: int) -> str:
    """The name of what led to this exit code."""
    return REASONS[signal.Signals(code - 128)]
