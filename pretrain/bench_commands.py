"""`python -m pretrain bench` and `bench-loop`: how fast a run is, how it scales, its loop."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from models.config import MAX_SEQ_LEN, MIXER_NAMES
from models.fla_peer import check_installed
from pretrain import scaling_report
from pretrain.command import Config, LocalRank, Overrides, on_ranks, print_error
from pretrain.config import load_config
from pretrain.distributed import World
from pretrain.errors import Refused, TrainingFailed
from pretrain.loop_overhead import measure_overhead
from pretrain.scaling import RESULTS_NAME, Study, checked_study, measure
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
    gpus: Annotated[
        str, typer.Option(help="Scaling instead, over these numbers of GPUs, as in 1,2.")
    ] = "",
    cpu_workers: Annotated[str, typer.Option(help="The same over numbers of CPU processes.")] = "",
    zero_stages: Annotated[str, typer.Option(help="Of scaling.")] = "1,2,3",
    launchers: Annotated[
        str, typer.Option(help="Of scaling: torchrun, ray or both, side by side.")
    ] = "torchrun,ray",
    rounds: Annotated[
        int, typer.Option(min=1, help="Of scaling: times that each run is measured.")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(help="Where JSON and PNG go; default: bench, for scaling RUN_DIR-scaling."),
    ] = None,
) -> None:
    """Tokens per second, memory and where the time goes, against the length of rows; with --gpus or
    --cpu-workers weak and strong scaling, under torchrun and Ray."""
    if gpus or cpu_workers:
        if updates < 2:
            print_error(f"--updates is too small for scaling: got {updates}; expected at least 2")
            raise typer.Exit(2)
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
                rounds=rounds,
                folder=output,
            )
        )
        return
    _throughput(
        config,
        overrides or [],
        against=against,
        mixers=mixers,
        lengths=lengths,
        batch_tokens=batch_tokens,
        micro_batch_tokens=micro_batch_tokens,
        updates=updates,
        longest=longest,
        limit=limit,
        memory_gib=memory_gib,
        output=output or Path("bench"),
    )


def _throughput(
    config: Path,
    overrides: list[str],
    *,
    against: str,
    mixers: str,
    lengths: str,
    batch_tokens: int,
    micro_batch_tokens: int,
    updates: int,
    longest: bool,
    limit: int | None,
    memory_gib: float | None,
    output: Path,
) -> None:
    """Measures models against the length of rows, prints the tables."""
    try:
        load_config(config, overrides)
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
        result = run_bench(config, overrides, jobs, longest, longest_limit(limit), output, console)
    except (OSError, ValueError) as error:
        print_error(str(error))
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


def _scaling(check: Callable[[], Study]) -> None:
    """Measures a study, prints its table and draws it."""
    # The run that is being measured ends with us.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        study = check()
        measured = measure(study)
        rows = scaling_report.rows(study, measured)
        figure = study.folder / "scaling.png"
        scaling_report.draw(study, measured, figure)
    except Refused as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    except (TrainingFailed, OSError) as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    typer.echo(scaling_report.markdown(rows), nl=False)
    typer.echo(f"results: {study.folder / RESULTS_NAME}, {figure}")


def bench_job(
    config: Config, overrides: Overrides = None, job: Annotated[str, typer.Option()] = ""
) -> None:
    """One model of `bench`, in a process of its own."""
    tree = json.loads(job)
    tree["lengths"] = tuple(tree["lengths"])
    on_ranks(None, lambda world: run_job(config, overrides or [], Job(**tree), world))


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

    on_ranks(local_rank, work)


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
