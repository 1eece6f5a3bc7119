"""How a launch ends when it is neither complete nor refused."""

from __future__ import annotations


class LaunchFailed(Exception):
    """Training did not complete; str() is what the user reads, `code` the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
