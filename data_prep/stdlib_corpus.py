"""A corpus that is wherever Python is: the source of its own standard library, some 12 MB.

Tests, installed packages and machine-made build settings are left out. The documents differ between
Python versions, so numbers measured on it are comparable under one version only.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STDLIB_INPUT = "stdlib"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """(name, path) of each source file in sorted order; name = "stdlib/" + path in the library."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                yield f"{STDLIB_INPUT}/{path.relative_to(root).as_posix()}", path
