"""What the command lines of several folders share: a group with a default command, and usage errors
in one line."""

import sys
from typing import Any

from typer import Typer
from typer.core import TyperGroup

INTERRUPTED = 130
"""What typer turns Ctrl-C into."""


def default_command(name: str) -> type[TyperGroup]:
    """A group whose arguments go to the command `name` where they begin with no command's name."""

    class DefaultCommand(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] != "--help":
                args = [name, *args]
            return super().parse_args(ctx, args)

    return DefaultCommand


def run_command_line(app: Typer) -> int:
    """Runs a command line; where it was typed wrongly, says so in one line.

    Returns:
        The exit code: 0, 2 for a usage error, INTERRUPTED, or what typer.Exit was raised with.

    Raises:
        What the commands raise.
    """
    try:
        return app(standalone_mode=False) or 0
    except Exception as error:
        # A usage error. typer carries its own copy of click, so the class has no stable name.
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(error.format_message().split()).removesuffix(".")
        print(f"error: {message}; see --help", file=sys.stderr)
        return 2
