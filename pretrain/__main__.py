"""python -m pretrain CONFIG.yaml [section.key=value ...]

The same command runs alone, under torchrun, under the deepspeed launcher and in a Ray worker.
Started again, it goes on from the newest complete checkpoint of its run folder; when the run is
complete, it says so.

Exit codes: 0 complete, 2 refused before training, 1 failed while training, 143 / 130 stopped by
SIGTERM / SIGINT after a checkpoint was written.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pretrain import train as training
from pretrain.distributed import start_world, stop_world
from pretrain.errors import Refused, TrainingFailed
from pretrain.sweep import run_sweep


class TrainByDefault(TyperGroup):
    """`python -m pretrain CONFIG` is `python -m pretrain train CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["train", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=TrainByDefault, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def pretrain() -> None:
    """Trains language models. `python -m pretrain CONFIG` is short for `train CONFIG`."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, each replaces one setting.")
    ] = None,
    local_rank: Annotated[
        int | None,
        typer.Option("--local_rank", hidden=True, help="The deepspeed launcher appends it."),
    ] = None,
) -> None:
    """Trains the run of a config file, or goes on where it stopped."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    try:
        world = start_world()
    except Refused as error:
        _print_error(str(error))
        raise typer.Exit(2) from None
    try:
        exit_code = training.train(config, overrides or [], world)
    except Refused as error:
        if world.rank == 0:
            _print_error(str(error))
        world.barrier()  # a launcher that sees one rank end may kill the others before they speak
        exit_code = 2
    except (TrainingFailed, OSError) as error:
        if world.rank == 0 or not getattr(error, "on_all_ranks", False):
            _print_error(str(error))
        exit_code = 1
    stop_world(world)
    raise typer.Exit(exit_code)


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="YAML file of the sweep.")],
    sweep_dir: Annotated[
        Path | None, typer.Option(help="Where its runs and its table go, instead of the file's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    gpus: Annotated[int, typer.Option(min=1, help="How many to use.")] = 1,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time on each GPU (8), or on the CPU (1).")
    ] = None,
) -> None:
    """Trains and scores a grid of small models on a synthetic task, or what is left of it."""
    try:
        run_sweep(config, sweep_dir=sweep_dir, device=device, gpus=gpus, workers=workers)
    except Refused as error:
        _print_error(str(error))
        raise typer.Exit(2) from None
    except (TrainingFailed, OSError) as error:
        _print_error(str(error))
        raise typer.Exit(1) from None


def _print_error(message: str) -> None:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)


if __name__ == "__main__":
    app()
