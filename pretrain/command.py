"""What the commands of `python -m pretrain` share: their arguments, their errors, their ranks."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pretrain.distributed import World, is_lost_peer, start_world, stop_world
from pretrain.errors import Refused, TrainingFailed

Config = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, each replaces one setting.")
]
LocalRank = Annotated[
    int | None,
    typer.Option("--local_rank", hidden=True, help="The deepspeed launcher appends it."),
]


def on_ranks(local_rank: int | None, work: Callable[[World], int]) -> None:
    """Does work on this rank of the world that a launcher made, and ends the process."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    try:
        world = start_world()
    except Refused as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    try:
        exit_code = work(world)
    except Refused as error:
        if world.rank == 0:
            print_error(str(error))
        world.barrier()  # a launcher that sees one rank end may kill the others before they speak
        exit_code = 2
    except (TrainingFailed, OSError) as error:
        if world.rank == 0 or not getattr(error, "on_all_ranks", False):
            print_error(str(error))
        exit_code = 1
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        # Whatever ended the other one has been told by it, or by who killed it.
        what = f"{type(error).__name__}: {str(error).splitlines()[0].split('. ')[0]}"
        print_error(f"rank {world.rank} lost another rank ({what}); start the same command again")
        if world.owns_group:
            os._exit(1)  # nobody is left to leave the group with
        raise typer.Exit(1) from None
    stop_world(world)
    if world.owns_group:
        # The process is ours. DeepSpeed and gloo leave threads of C++ behind, and destroying them
        # at the interpreter's end has aborted processes whose work was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise typer.Exit(exit_code)


def print_error(message: str) -> None:
    """Each line of what a user can mend, on stderr."""
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
