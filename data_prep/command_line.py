"""A command group with a default command, for the command lines of several folders."""

from typing import Any

from typer.core import TyperGroup


def default_command(name: str) -> type[TyperGroup]:
    """A group whose arguments go to the command `name` where they begin with no command's name."""

    class DefaultCommand(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] != "--help":
                args = [name, *args]
            return super().parse_args(ctx, args)

    return DefaultCommand
