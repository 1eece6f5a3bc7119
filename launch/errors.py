"""How a launch ends when it is not complete."""

from __future__ import annotations


class LaunchFailed(Exception):
    """Training did not complete; str() is what the user reads, `code` the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NodeRefused(ValueError):
    """A node is not fit for the run; str() is one line that names it."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(f"node {node}: {problem}")
        self.node = node
