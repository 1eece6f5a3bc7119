"""python -m pretrain CONFIG.yaml [section.key=value ...] [--dry-run]
python -m pretrain compare RUN_A RUN_B | bench CONFIG.yaml | bench-loop CONFIG.yaml

The same command runs alone, under torchrun, under the deepspeed launcher and in a Ray worker.
Started again, it goes on from the newest complete checkpoint of its run folder; when the run is
complete, it says so.

Exit codes: 0 complete, 2 refused before training, 1 failed while training, 143 / 130 / 138 / 142
stopped by SIGTERM / SIGINT / SIGUSR1 / training.time_limit_minutes after a checkpoint was written.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from data_prep.early_interrupt import end_as_usual, end_quietly_while_importing

is_quiet = end_quietly_while_importing(__name__)

import typer
from rich.console import Console

from data_prep.command_line import default_command, run_command_line
from models.config import MAX_SEQ_LEN, MIXER_NAMES
from models.fla_peer import check_installed
from pretrain import train as training
from pretrain.checkpoint import check_config_place
from pretrain.compare import compare_runs
from pretrain.config import load_config
from pretrain.distributed import World, start_world, stop_world
from pretrain.dry_run import print_dry_run, ranks_of_environment
from pretrain.errors import Refused, Stopped, TrainingFailed
from pretrain.loop_overhead import measure_overhead
from pretrain.sweep import run_sweep
from pretrain.throughput import OUR
from pretrain.throughput_report import (
    Job,
    jobs_of,
    kinds_table,
    longest_limit,
    run_job,
    table,
)
from pretrain.throughput_report import bench as run_bench

LENGTHS = "2048,4096,8192,16384,32768,65536,131072"
PEERS = ("fla",)

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
    against: Annotated[
        str, typer.Option(help="Other code bases' models of the same shape: fla.")
    ] = "",
    mixers: Annotated[
        str, typer.Option(help="Mixers in place of the config's, commas between them.")
    ] = "",
    lengths: Annotated[str, typer.Option(help="Tokens of a row, commas between them.")] = LENGTHS,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Of an update.")] = 131072,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Of a forward pass; one row where rows are longer.")
    ] = 32768,
    updates: Annotated[int, typer.Option(min=1, help="Updates to time.")] = 10,
    longest: Annotated[
        bool, typer.Option("--longest", help="Also find the longest row that trains.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --longest: no longer rows.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of the device that may be used.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where JSON and PNG go.")] = Path("bench"),
) -> None:
    """Tokens per second, memory and where the time goes, against the length of rows."""
    try:
        load_config(config, overrides or [])
        peers = _names("--against", against, PEERS)
        if "fla" in peers:
            check_installed()
        jobs = jobs_of(
            peers,
            _names("--mixers", mixers, MIXER_NAMES),
            _lengths(lengths),
            batch_tokens=batch_tokens,
            micro_batch_tokens=micro_batch_tokens,
            updates=updates,
            checkpointing=None,
            memory_gib=memory_gib,
        )
        if output.exists() and not output.is_dir():
            raise ValueError(f"--output is a file: got {output}; expected a folder or a free name")
        console = Console(highlight=False, soft_wrap=True)
        result = run_bench(
            config, overrides or [], jobs, longest, longest_limit(limit), output, console
        )
    except (OSError, ValueError) as error:
        _print_error(str(error))
        raise typer.Exit(2) from None
    wide = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    wide.print(table(result))
    wide.print(kinds_table(result))
    for found in result["longest"]:
        name = found["mixer"] or "the config's mixer"
        typer.echo(f"{found['peer']} {name}: rows of up to {found['tokens']:,} tokens train")
    typer.echo(f"{output / 'throughput.json'} and .png")
    ours = [m for m in result["measurements"] if m["peer"] == OUR]
    if all("failure" in m for m in ours):
        raise typer.Exit(1)


@app.command("bench-job", hidden=True)
def bench_job(
    config: Config, overrides: Overrides = None, job: Annotated[str, typer.Option()] = ""
) -> None:
    """One model of `bench`, in a process of its own."""
    tree = json.loads(job)
    tree["lengths"] = tuple(tree["lengths"])
    _on_ranks(None, lambda world: run_job(config, overrides or [], Job(**tree), world))


@app.command("bench-loop")
def bench_loop(
    config: Config,
    overrides: Overrides = None,
    updates: Annotated[int, typer.Option(min=2, help="Updates of a round.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each loop.")] = 3,
    local_rank: LocalRank = None,
) -> None:
    """Times an update of this loop against one of bare DeepSpeed; not with optimizer.kind=muon."""

    def work(world: World) -> int:
        found = measure_overhead(config, overrides or [], world, updates, rounds)
        if world.rank == 0:
            for name, medians in (("ours", found.ours), ("bare", found.bare)):
                numbers = "  ".join(f"{1000 * t:.1f} ({1000 * cpu:.1f})" for t, cpu in medians)
                typer.echo(f"{name}  median ms of an update (of CPU time), by round: {numbers}")
            wall, cpu = found.percent(0), found.percent(1)
            typer.echo(f"overhead {wall:+.2f} % of time, {cpu:+.2f} % of CPU time")
        return 0

    _on_ranks(local_rank, work)


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ValueError(
                f"{option} has an unknown name: got {name}; expected some of {', '.join(known)}"
            )
    return names


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 2 <= int(part) <= MAX_SEQ_LEN for part in parts):
        raise ValueError(
            f"--lengths has something else than lengths: got {text}; expected whole numbers from 2 "
            f"to {MAX_SEQ_LEN}, commas between them"
        )
    return tuple(map(int, parts))


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
