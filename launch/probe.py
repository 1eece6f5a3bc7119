"""What a node has: asked by the launcher before it starts anything there.

Sent to the node by value, since this repository may not be there, so it uses the standard library
alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any


def probe(question: dict[str, Any]) -> dict[str, Any]:
    """Answers a question about this node.

    Args:
        question: root (folder of this repository), libraries and modules (names),
            working_directory, tokens (path -> text that the file must hold), answers (folder to
            leave a file in, or None), manifests (paths), disk (path: how much is free there).

    Returns:
        host, python, versions (name -> version or None), missing (modules), repository,
        working_directory (both: are they here), unseen (paths of tokens), answer (path of the file
        left, or "" and why in answer_error), manifests (path -> sha256 or None), free_bytes,
        temporary_free_bytes.
    """
    answer, answer_error = "", ""
    if question["answers"] is not None:
        path = Path(question["answers"], f"seen-{uuid.uuid4().hex}")
        try:
            path.write_text("seen")
            answer = str(path)
        except OSError as error:
            answer_error = error.strerror or str(error)
    return {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {name: _version(name) for name in question["libraries"]},
        "missing": [name for name in question["modules"] if not _is_there(name)],
        "repository": Path(question["root"], "launch", "__init__.py").is_file(),
        "working_directory": Path(question["working_directory"]).is_dir(),
        "unseen": [p for p, text in question["tokens"].items() if _text(p) != text],
        "answer": answer,
        "answer_error": answer_error,
        "manifests": {path: _sha256(path) for path in question["manifests"]},
        "free_bytes": _free_bytes(question["disk"]),
        "temporary_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _sha256(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _free_bytes(path: str) -> int:
    """Of the file system that `path` is on, or would be."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free
