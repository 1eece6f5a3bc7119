"""RUN/logs/launch.json: what a launch is and what happened to it, for `launch status`."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.cluster import Request
from launch.failure import Failure
from launch.nodes import Node
from models.checkpoint_directory import write_atomically
from pretrain.config import LOGS_FOLDER

RECORD_NAME = "launch.json"


class Record:
    """Written anew at every event; times are seconds since 1970."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOGS_FOLDER / RECORD_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._facts: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": time.time(),
            "state": "starting",
            "starts": [],
            "failures": [],
        }
        self._write()

    def starts(self, nodes: Sequence[Node], request: Request) -> None:
        """Ranks are being started on these nodes."""
        names = [node.name for node in nodes]
        ranks = len(nodes) * request.workers_per_node
        self._facts["starts"].append({"time": time.time(), "nodes": names, "ranks": ranks})
        self._facts["state"] = "training"
        self._write()

    def failed(self, failure: Failure) -> None:
        """They ended before the run was complete."""
        self._facts["failures"].append(
            {"time": time.time(), "step": failure.step, "message": failure.message}
        )
        self._facts["state"] = "restarting"
        self._write()

    def ended(self, state: str) -> None:
        """The launch is over: complete, stopped or failed."""
        self._facts["state"] = state
        self._write()

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self._facts, indent=1).encode())


def read_record(run_dir: Path) -> dict[str, Any] | None:
    """What a launch last wrote, or None where none has run here."""
    try:
        facts = json.loads((run_dir / LOGS_FOLDER / RECORD_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
