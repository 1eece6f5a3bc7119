"""`python ray_guard.py FOLDER`: ends a private Ray whose command was killed.

The kernel ends what that command started, but not what those processes started: Ray's agents then
try for a minute to report it to a server that is gone. This process reads the numbers of Ray's
sessions, a line each, until its standard input closes, which whatever ends the command does. It
then ends every process of these sessions and removes Ray's folder. Linux only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

END_SECONDS = 10.0


class Guard:
    """The command's side: the process that outlives it for a moment."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what is sent to all of our group is not for it
        )

    def watch(self, session: int) -> None:
        """From now on this session ends with us."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody ended it: we do without
            self._process.stdin.write(b"%d\n" % session)
            self._process.stdin.flush()

    def close(self) -> None:
        """Ray has ended; its sessions' last processes and its folder go now."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def end_sessions(sessions: set[int]) -> None:
    """Ends every process of these sessions, and what they start meanwhile."""
    deadline = time.monotonic() + END_SECONDS
    while (alive := members(sessions)) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def members(sessions: set[int]) -> list[int]:
    """Ids of the living processes of these sessions."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                # "pid (name) state parent group session ..."; a name may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[3]) in sessions:
                    found.append(int(entry.name))
    return found


if __name__ == "__main__":
    end_sessions({int(line) for line in sys.stdin})
    shutil.rmtree(sys.argv[1], ignore_errors=True)
