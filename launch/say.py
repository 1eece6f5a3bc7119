"""Lines for the user, who may be gone: a closed terminal, or a `tee` that Ctrl-C ended first."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO


def tell(line: str) -> None:
    """A line at once; nothing where nobody can read it, since training does not end for that."""
    _write(line, sys.stdout)


def complain(line: str) -> None:
    """The same on stderr."""
    _write(line, sys.stderr)


def _write(line: str, stream: TextIO) -> None:
    with suppress(OSError):
        print(line, file=stream, flush=True)
