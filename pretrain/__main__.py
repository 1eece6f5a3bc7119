"""python -m pretrain CONFIG.yaml [section.key=value ...] [--dry-run]
python -m pretrain compare RUN_A RUN_B | bench CONFIG.yaml [--gpus 1,2]

The same command runs alone, under torchrun, under the deepspeed launcher and in a Ray worker.
Started again, it goes on from the newest complete checkpoint of its run folder; when the run is
complete, it says so.

Exit codes: 0 complete, 2 refused before training, 1 failed while training, 143 / 130 / 138 / 142
stopped by SIGTERM / SIGINT / SIGUSR1 / training.time_limit_minutes after a checkpoint was written.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from data_prep.early_interrupt import end_as_usual, end_quietly_while_importing

is_quiet = end_quietly_while_importing(__name__)

import typer
from rich.console import Console

from data_prep.command_line import default_command, run_command_line
from pretrain import scaling_report
from pretrain import train as training
from pretrain.bench import measure_overhead
from pretrain.checkpoint import check_config_place
from pretrain.compare import compare_runs
from pretrain.config import load_config
from pretrain.distributed import World, start_world, stop_world
from pretrain.dry_run import print_dry_run, ranks_of_environment
from pretrain.errors import Refused, Stopped, TrainingFailed
from pretrain.scaling import RESULTS_NAME, Study, checked_study, measure
from pretrain.sweep import run_sweep

app = typer.Typer(
    cls=default_command("train"), add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def pretrain() -> None:
    """Trains language models. `python -m pretrain CONFIG` is short for `train CONFIG`."""


Config = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, each replaces one setting.")
]
LocalRank = Annotated[
    int | None,
    typer.Option("--local_rank", hidden=True, help="The deepspeed launcher appends it."),
]


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
    _on_ranks(local_rank, lambda world: training.train(config, overrides or [], world))


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
        _print_error(str(error))
        raise typer.Exit(2) from None
    typer.echo(f"{result.steps} steps in both, {result.first} to {result.last}")
    for name, gap in result.largest.items():
        typer.echo(f"{name:<16} largest relative difference {gap:.3g}")
    if result.difference is None:
        typer.echo("the runs are equal")
        return
    found = result.difference
    typer.echo(f"they part at step {found.step}: {found.name} is {found.a} and {found.b}")
    raise typer.Exit(1)


@app.command()
def bench(
    config: Config,
    overrides: Overrides = None,
    updates: Annotated[int, typer.Option(min=2, help="Updates of a round.")] = 40,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of each loop (3) or each run (1); the quickest counts."),
    ] = None,
    gpus: Annotated[
        str, typer.Option(help="Scaling instead, over these numbers of GPUs, as in 1,2.")
    ] = "",
    cpu_workers: Annotated[str, typer.Option(help="The same over numbers of CPU processes.")] = "",
    zero_stages: Annotated[str, typer.Option(help="Of scaling.")] = "1,2,3",
    launchers: Annotated[
        str, typer.Option(help="Of scaling: torchrun, ray or both, side by side.")
    ] = "torchrun,ray",
    output: Annotated[
        Path | None, typer.Option(help="Folder of scaling's results; default: RUN_DIR-scaling.")
    ] = None,
    local_rank: LocalRank = None,
) -> None:
    """Times an update of this loop against one of bare DeepSpeed (not with optimizer.kind=muon);
    with --gpus or --cpu-workers: weak and strong scaling, under torchrun and Ray."""
    if gpus or cpu_workers:
        _scaling(
            partial(
                checked_study,
                config,
                overrides or [],
                gpus=gpus,
                cpu_workers=cpu_workers,
                zero_stages=zero_stages,
                launchers=launchers,
                updates=updates,
                rounds=rounds or 1,
                folder=output,
            )
        )
        return

    def work(world: World) -> int:
        found = measure_overhead(config, overrides or [], world, updates, rounds or 3)
        if world.rank == 0:
            for name, medians in (("ours", found.ours), ("bare", found.bare)):
                numbers = "  ".join(f"{1000 * t:.1f} ({1000 * cpu:.1f})" for t, cpu in medians)
                typer.echo(f"{name}  median ms of an update (of CPU time), by round: {numbers}")
            wall, cpu = found.percent(0), found.percent(1)
            typer.echo(f"overhead {wall:+.2f} % of time, {cpu:+.2f} % of CPU time")
        return 0

    _on_ranks(local_rank, work)


def _scaling(check: Callable[[], Study]) -> None:
    """Measures a study, prints its table and draws it."""
    # The run that is being measured ends with us.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        study = check()
        measured = measure(study)
        table = scaling_report.rows(study, measured)
        figure = study.folder / "scaling.png"
        scaling_report.draw(study, measured, figure)
    except Refused as error:
        _print_error(str(error))
        raise typer.Exit(2) from None
    except (TrainingFailed, OSError) as error:
        _print_error(str(error))
        raise typer.Exit(1) from None
    typer.echo(scaling_report.markdown(table), nl=False)
    typer.echo(f"results: {study.folder / RESULTS_NAME}, {figure}")


def _on_ranks(local_rank: int | None, work: Callable[[World], int]) -> None:
    """Does work on this rank of the world that a launcher made, and ends the process."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    try:
        world = start_world()
    except Refused as error:
        _print_error(str(error))
        raise typer.Exit(2) from None
    try:
        exit_code = work(world)
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
    if world.owns_group:
        # The process is ours. DeepSpeed and gloo leave threads of C++ behind, and destroying them
        # at the interpreter's end has aborted processes whose work was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise typer.Exit(exit_code)


def _plan(config: Path, overrides: list[str], ranks: int | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    try:
        settings = load_config(config, overrides)
        check_config_place(settings, config)
        print_dry_run(settings, ranks or ranks_of_environment(), console)
    except (OSError, ValueError) as error:
        _print_error(str(error))
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
        int | None, typer.Option(min=1, help="Runs at a time on each GPU (8), or on the CPU (1).")
    ] = None,
) -> None:
    """Trains and scores a grid of small models on a synthetic task, or what is left of it."""
    try:
        run_sweep(config, sweep_dir=sweep_dir, device=device, gpus=gpus, workers=workers)
    except Stopped as stop:
        typer.echo(f"{stop}: start the same command again to go on", err=True)
        raise typer.Exit(stop.exit_code) from None
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
    if is_quiet:
        end_as_usual()
    sys.exit(run_command_line(app))
