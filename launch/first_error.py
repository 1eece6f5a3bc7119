"""What a rank complained of first, from what it printed."""

from __future__ import annotations

import re

PREFIX = "error: "
TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"\[rank\d+\]: ?")
"""torch puts it before every line of a traceback."""


class FirstError:
    """Fed with a rank's lines, knows its `error: ` lines and the end of its first traceback."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.exception: str | None = None
        self._in_traceback = False

    def feed(self, line: str) -> bool:
        """Takes a line; returns whether it is for the user now.

        Errors come with the end of the rank, and of a traceback the user sees the last line; all
        of it is in the rank's log.
        """
        if line.startswith(PREFIX):
            self.complaints.append(line.removeprefix(PREFIX))
            return False
        bare = line[found.end() :] if (found := _RANK.match(line)) else line
        if bare == TRACEBACK:
            self._in_traceback = True
        elif self._in_traceback and bare and not bare[0].isspace():
            self._in_traceback = False
            if self.exception is None:
                self.exception = bare
        return not self._in_traceback

    @property
    def message(self) -> str:
        """One line, or more where the program itself said more; empty: it said nothing."""
        if self.complaints:
            return "\n".join(self.complaints)
        return self.exception or ""
