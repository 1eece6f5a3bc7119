"""What runs in each Ray Train worker: `python -m pretrain CONFIG [section.key=value ...]`.

Ray Train has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR and initialised torch.distributed,
just as torchrun would have done for the same command.
"""

from __future__ import annotations

import io
import logging
import os
import runpy
import sys
from typing import Any, TextIO

PREFIX = "error: "


class TrainingStopped(Exception):
    """pretrain ended with an exit code other than 0; `message` is what it said on stderr."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)  # both in args, so that it survives pickling
        self.code = code
        self.message = message


class Listener(io.TextIOBase):
    """A text stream that passes lines on and remembers those that begin with `error: `.

    Args:
        stream: where they go.
        label: put before every line; tells the ranks apart.
    """

    def __init__(self, stream: TextIO, label: str) -> None:
        self.stream = stream
        self.label = label
        self.complaints: list[str] = []
        self._unfinished = ""

    def write(self, text: str) -> int:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            self.stream.write(f"{self.label}{line}\n")
            if line.startswith(PREFIX):
                self.complaints.append(line.removeprefix(PREFIX))
        self.stream.flush()
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typer asks for it before it writes
        return self.stream.encoding


def run_pretrain(job: dict[str, Any]) -> None:
    """Runs pretrain's main in this process.

    Args:
        job: working_directory (str; relative paths of the config start there) and argv (list[str]).

    Raises:
        TrainingStopped: pretrain called for an exit code other than 0.
        Anything else that pretrain lets through.
    """
    if not os.path.isdir(job["working_directory"]):
        raise TrainingStopped(
            2,
            f"working directory is missing on {os.uname().nodename}: got "
            f"{job['working_directory']}; expected the same path on every node (a shared file "
            "system)",
        )
    os.chdir(job["working_directory"])
    sys.argv = ["pretrain", *job["argv"]]
    rank = int(os.environ.get("RANK", "0"))
    label = f"rank {rank}: " if rank else ""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Listener(stdout, label), (heard := Listener(stderr, label))
    try:
        runpy.run_module("pretrain", run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            code = stop.code if isinstance(stop.code, int) else 1
            # Ray would log a traceback of an ending that pretrain has already explained.
            logging.getLogger("ray.train").setLevel(logging.CRITICAL)
            raise TrainingStopped(code, "\n".join(heard.complaints)) from None
    finally:
        sys.stdout, sys.stderr = stdout, stderr
