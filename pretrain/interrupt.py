"""SIGTERM and SIGINT: finish the step, save, leave with the shell's exit code for the signal."""

import signal
import threading
from types import FrameType

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Interrupt:
    """Remembers the first signal that asked to stop; a second one of its kind ends the process.

    In a thread other than the main one (a Ray worker) signals cannot be caught and nothing is
    installed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                signal.signal(number, self._remember)

    @property
    def exit_code(self) -> int:
        """143 for SIGTERM, 130 for SIGINT; 143 on a rank that only followed another's signal."""
        return EXIT_CODES[self.received or signal.SIGTERM]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
