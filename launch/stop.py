"""Ctrl-C, SIGTERM, SIGHUP of a closed terminal, Slurm's SIGUSR1: ranks save before all ends.

start-up, between two starts   the launcher ends at once
while ranks run                they get the signal, save and end; a second one ends at once
while it ends                  nothing: everything is being ended already
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

from launch.descendants import end_all
from launch.errors import LaunchFailed
from launch.say import complain

CLEAN_UP_SECONDS = 10.0
SAME_SECONDS = 0.5
AGAIN = "start the same command again to go on from the newest checkpoint"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


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
        self._came = 0.0
        self._has_raised = False
        self._deadline = 0.0
        self._hard_end: threading.Timer | None = None
        self._hard_end_due = 0.0
        self._handled = threading.Event()
        # Written by the C part of a signal, at once; the Python part has to wait for whatever the
        # main thread is in, which may be Ray waiting for a process that is gone.
        self._bell, self._rung = socket.socketpair()
        self._rung.setblocking(False)
        self._bell_before = signal.set_wakeup_fd(self._rung.fileno())
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        self._hook_before = sys.unraisablehook
        sys.unraisablehook = self._raise_again
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._remember)
            for number in SIGNALS
            # nohup's way to say that a closed terminal changes nothing.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

    def restore(self) -> None:
        """Signals do what they did before; what one began is over, and nothing is ended for it."""
        if self._hard_end is not None:
            self._hard_end.cancel()
        sys.unraisablehook = self._hook_before
        signal.set_wakeup_fd(self._bell_before)
        self._rung.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    @property
    def for_ranks(self) -> int:
        """The signal that ranks get; they know nothing of terminals."""
        assert self.signal is not None
        return signal.SIGTERM if self.signal == signal.SIGHUP else self.signal

    @property
    def expired(self) -> bool:
        """Whether the ranks have had their time."""
        return self.requested and time.monotonic() > self._deadline

    def failure(self, when: str) -> LaunchFailed:
        """What the user reads, with the shell's exit code for the signal."""
        assert self.signal is not None
        return LaunchFailed(
            f"stopped by {signal.Signals(self.signal).name} {when}; {AGAIN}",
            128 + self.signal,
        )

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._handled.set()
        if self.ending or (self.requested and not self._has_raised and self._is_the_same(number)):
            return
        if self.requested or not self.graceful:
            self.ending = True
            self.signal = self.signal or number
            self._has_raised = True
            self._end_hard_after(CLEAN_UP_SECONDS)
            raise KeyboardInterrupt
        self.signal = number
        self._came = time.monotonic()
        self._deadline = self._came + self.seconds
        self._end_hard_after(self.seconds + CLEAN_UP_SECONDS)
        complain(f"stopping: up to {self.seconds:.0f} s for a checkpoint; once more ends at once")

    def _end_hard_after(self, seconds: float) -> None:
        """The end at the latest; what an earlier signal has set may only come closer."""
        assert self.signal is not None
        due = time.monotonic() + seconds
        if self._hard_end is not None:
            if due > self._hard_end_due:
                return
            self._hard_end.cancel()
        self._hard_end_due = due
        self._hard_end = threading.Timer(seconds, _end_hard, (128 + self.signal,))
        self._hard_end.daemon = True
        self._hard_end.start()

    def _is_the_same(self, number: int) -> bool:
        """Whether a further signal is nobody's impatience: a shell passes on the SIGHUP that its
        jobs have got from the terminal, `timeout` signals its child and then the child's group."""
        return number == signal.SIGHUP or time.monotonic() - self._came < SAME_SECONDS

    def _raise_again(self, lost: sys.UnraisableHookArgs) -> None:
        """What a signal raises is lost where Python cannot raise, as in an object's end."""
        if self.signal is None or not issubclass(lost.exc_type, KeyboardInterrupt):
            self._hook_before(lost)
            return
        self.ending = False
        main = threading.main_thread().ident
        threading.Timer(0.1, signal.pthread_kill, (main, self.signal)).start()

    def _watch(self) -> None:
        while number := self._bell.recv(1):
            if number[0] in SIGNALS and not self._handled.wait(CLEAN_UP_SECONDS):
                _end_hard(128 + number[0])
        self._bell.close()


def _end_hard(code: int) -> None:
    """Ends this process and all below it, where cleaning up has not got that far."""
    end_all(spare=set())
    name = signal.Signals(code - 128).name
    complain(f"error: stopped by {name} at once; {AGAIN}")
    os._exit(code)
