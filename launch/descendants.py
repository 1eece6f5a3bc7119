"""That nothing we started outlives us: orphans come back to this process, and are ended by it.

Ray's processes are many, start each other, and a launch may be interrupted while they do; what
Ray itself knows of them is then not all there is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 10.0


@contextmanager
def no_survivors() -> Iterator[None]:
    """When it is left, every process that was started inside is ended, however it was started."""
    if sys.platform != "linux":
        yield
        return
    before = set(descendants())
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_all(spare=before)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


def end_all(spare: set[int]) -> None:
    """Ends descendants until there are none, except these."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        alive = set(descendants()) - spare
        if not alive:
            return
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in alive:
            with suppress(ChildProcessError):  # a grandchild; or reaped by who started it
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def descendants() -> list[int]:
    """Ids of all living processes below this one."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                # "pid (name) state parent ..."; a name may hold anything.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z" or int(parent) == os.getpid():
                    children[int(parent)].append(int(entry.name))
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        born = children[parents.pop()]
        found += born
        parents += born
    return found
