"""SIGTERM, SIGINT or RUN/stop: finish the step, save, leave with the shell's exit code."""

import signal
import threading
from pathlib import Path
from types import FrameType

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Interrupt:
    """Remembers the first signal that asked to stop; a second one of its kind ends the process.

    In a thread other than the main one (a Ray worker) signals cannot be caught and nothing is
    installed: there the launcher makes the file of `watch`, and so can a user anywhere.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._stop_file: Path | None = None
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                signal.signal(number, self._remember)

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        by_file = self._stop_file is not None and self._stop_file.exists()
        return self.received is not None or by_file

    def watch(self, stop_file: Path) -> None:
        """From now on the existence of this file asks to stop too."""
        self._stop_file = stop_file

    @property
    def exit_code(self) -> int:
        """143 for SIGTERM, 130 for SIGINT; 143 where the file asked, or another rank's signal."""
        return EXIT_CODES[self.received or signal.SIGTERM]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
