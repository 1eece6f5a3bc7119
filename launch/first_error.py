"""What a rank complained of first, from what it printed."""

from __future__ import annotations

PREFIX = "error: "
TRACEBACK = "Traceback (most recent call last):"


class FirstError:
    """Fed with a rank's lines, knows its `error: ` lines and the end of its first traceback."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.exception: str | None = None
        self._in_traceback = False

    def feed(self, line: str) -> bool:
        """Takes a line; returns whether it is an `error: ` line."""
        if line.startswith(PREFIX):
            self.complaints.append(line.removeprefix(PREFIX))
            return True
        if line == TRACEBACK:
            self._in_traceback = True
        elif self._in_traceback and line and not line[0].isspace():
            self._in_traceback = False
            if self.exception is None:
                self.exception = line
        return False

    @property
    def message(self) -> str:
        """One line, or more where the program itself said more; empty: it said nothing."""
        if self.complaints:
            return "\n".join(self.complaints)
        return self.exception or ""
