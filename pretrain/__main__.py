"""python -m pretrain CONFIG.yaml [section.key=value ...] [--dry-run]
python -m pretrain compare RUN_A RUN_B | sweep SWEEP.yaml
python -m pretrain bench CONFIG.yaml [--gpus 1,2] | bench-loop CONFIG.yaml

The same command runs alone, under torchrun, under the deepspeed launcher and in a Ray worker.
Started again, it goes on from the newest complete checkpoint of its run folder; when the run is
complete, it says so.

Exit codes: 0 complete, 2 refused before training, 1 failed while training, 143 / 130 / 138 / 142
stopped by SIGTERM / SIGINT / SIGUSR1 / training.time_limit_minutes after a checkpoint was written.
"""

import sys
from pathlib import Path
from typing import Annotated

from data_prep.early_interrupt import end_as_usual, end_quietly_while_importing

is_quiet = end_quietly_while_importing(__name__)

import typer
from rich.console import Console

from data_prep.command_line import default_command, run_command_line
from pretrain import bench_commands
from pretrain import train as training
from pretrain.checkpoint import check_config_place
from pretrain.command import Config, LocalRank, Overrides, on_ranks, print_error
from pretrain.compare import compare_runs
from pretrain.config import load_config
from pretrain.dry_run import print_dry_run, ranks_of_environment
from pretrain.errors import Refused, Stopped, TrainingFailed
from pretrain.sweep import run_sweep

app = typer.Typer(
    cls=default_command("train"), add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def pretrain() -> None:
    """Trains language models. `python -m pretrain CONFIG` is short for `train CONFIG`."""


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run will be; start nothing.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: GPUs of the run.")
    ] = None,
    local_rank: LocalRank = None,
) -> None:
    """Trains the run of a config file, or goes on where it stopped."""
    if dry_run:
        _plan(config, overrides or [], ranks)
        return
    on_ranks(local_rank, lambda world: training.train(config, overrides or [], world))


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="Folder of a run.")],
    run_b: Annotated[Path, typer.Argument(help="Folder of another, or of the same one resumed.")],
    tolerance: Annotated[
        float, typer.Option(min=0, help="Relative difference that counts as equal.")
    ] = 0.0,
) -> None:
    """Says at which step two runs part: exit code 0 where they never do, 1 where they do."""
    try:
        result = compare_runs(run_a, run_b, tolerance)
    except (OSError, ValueError) as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    typer.echo(f"{result.steps} steps in both, {result.first} to {result.last}")
    for run, more in zip((run_a, run_b), result.beyond, strict=True):
        if more:
            typer.echo(f"{more} more in {run}, with nothing to compare them to")
    for name, gap in result.largest.items():
        typer.echo(f"{name:<16} largest relative difference {gap:.3g}")
    if result.difference is None:
        typer.echo("the runs are equal")
        return
    found = result.difference
    typer.echo(f"they part at step {found.step}: {found.name} is {found.a} and {found.b}")
    raise typer.Exit(1)


def _plan(config: Path, overrides: list[str], ranks: int | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    try:
        settings = load_config(config, overrides)
        check_config_place(settings, config)
        print_dry_run(settings, ranks or ranks_of_environment(), console)
    except (OSError, ValueError) as error:
        print_error(str(error))
        raise typer.Exit(2) from None


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="YAML file of the sweep.")],
    sweep_dir: Annotated[
        Path | None, typer.Option(help="Where its runs and its table go, instead of the file's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    gpus: Annotated[int, typer.Option(min=1, help="How many to use.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at a time on each GPU (8; training runs 1), or on the CPU (1)."
        ),
    ] = None,
) -> None:
    """Trains and scores a grid of small models or of training runs, or what is left of it."""
    try:
        run_sweep(config, sweep_dir=sweep_dir, device=device, gpus=gpus, workers=workers)
    except Stopped as stop:
        typer.echo(f"{stop}: start the same command again to go on", err=True)
        raise typer.Exit(stop.exit_code) from None
    except Refused as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    except (TrainingFailed, OSError) as error:
        print_error(str(error))
        raise typer.Exit(1) from None


app.command()(bench_commands.bench)
app.command("bench-job", hidden=True)(bench_commands.bench_job)
app.command("bench-loop")(bench_commands.bench_loop)


if __name__ == "__main__":
    if is_quiet:
        end_as_usual()
    sys.exit(run_command_line(app))
