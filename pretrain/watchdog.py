"""Ends a run that stands still, and says where every rank stood.

A thread per rank looks at the time of the last sign of progress. Compiling kernels is none, but no
hang either: a rank whose training thread is inside a compiler says so to the others by touching
RUN/stacks/compiling, and the longer limit holds for all. Whoever runs out of time writes
RUN/stacks/hang; every rank that sees it writes its stacks beside it and ends.
"""

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pretrain.sections import HealthConfig

STACKS_FOLDER = "stacks"
EXIT_CODE = 1
_COMPILERS = ("/triton/compiler/", "/torch/_inductor/", "/torch/_dynamo/", "/cpp_extension.py")


class Watchdog:
    """Watches the thread that makes it.

    Args:
        run_dir: folder of the run, shared by all ranks.
        rank: this rank.
        settings: the limits.
    """

    def __init__(self, run_dir: Path, rank: int, settings: HealthConfig) -> None:
        self._folder = run_dir / STACKS_FOLDER
        self._rank = rank
        self._limit = settings.hang_seconds
        self._compile_limit = settings.compile_seconds
        self._watched = threading.get_ident()
        self._what = "start-up"
        self._seen = time.monotonic()
        self._warm = False
        self._ended = threading.Event()
        if self._limit is not None:
            self._poll_seconds = min(5.0, self._limit / 4)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def progress(self, what: str) -> None:
        """A sign of progress; `what` begins now."""
        self._what, self._seen = what, time.monotonic()

    def update_done(self) -> None:
        """A whole update is done: from now on everything that it needs is compiled."""
        self._warm = True

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_seconds):
            if _is_compiling(sys._current_frames().get(self._watched)):
                self._mark("compiling")
            still = time.monotonic() - self._seen
            over = still > self._limit_now()
            if over:
                self._mark("hang")
            if over or (self._folder / "hang").exists():
                self._end(still)

    def _mark(self, name: str) -> None:
        with suppress(OSError):  # a full disk may be why the run stands still
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).touch()

    def _limit_now(self) -> float:
        limit = self._limit or float("inf")
        if not self._warm or self._somebody_compiles():
            return max(limit, self._compile_limit)
        return limit

    def _somebody_compiles(self) -> bool:
        try:
            age = time.time() - (self._folder / "compiling").stat().st_mtime
        except OSError:
            return False
        return age < max(60.0, 3 * self._poll_seconds)  # clocks of machines differ

    def _end(self, still: float) -> None:
        path, where = self._folder / f"rank-{self._rank:05d}.txt", f"in {self._folder}"
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"rank {self._rank}: no progress for {still:.0f} s in {self._what}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                os.fsync(file.fileno())
        except OSError as error:
            where = f"above, since they cannot be written: {error.strerror}"
            faulthandler.dump_traceback(all_threads=True)
        sys.stderr.write(
            f"error: rank {self._rank} made no progress for {still:.0f} s in {self._what}; "
            f"expected less (health.hang_seconds); stacks of all ranks are {where}; "
            "start the same command again\n"
        )
        sys.stderr.flush()
        time.sleep(2 * self._poll_seconds)  # a launcher that sees one rank end may kill the others
        os._exit(EXIT_CODE)


def clear(run_dir: Path) -> None:
    """Removes the marks of an earlier start, before any rank watches."""
    for name in ("hang", "compiling"):
        (run_dir / STACKS_FOLDER / name).unlink(missing_ok=True)


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _COMPILERS):
            return True
        frame = frame.f_back
    return False
