"""python -m launch CONFIG.yaml --nodes N --gpus-per-node G [section.key=value ...]
python -m launch status | logs | stop | list
python -m launch --module eval|data_prep ...

Trains through Ray, or runs evaluation and data preparation on it: on a private one on this machine,
or on a running cluster by --address. Exit codes are those of python -m pretrain; 1 also where the
restarts are used up.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from data_prep.early_interrupt import end_quietly_while_importing

is_quiet = end_quietly_while_importing(__name__)

import typer

from data_prep.command_line import default_command, run_command_line
from launch import jobs
from launch.cluster import Request
from launch.errors import LaunchFailed
from launch.module import FLAG
from launch.module import app as module_app
from launch.say import complain
from launch.stop import StopRequest
from launch.supervisor import Limits
from launch.training import Choices, check_request, train
from pretrain.config import check_run_dir, checked_manifest, load_config

DEFAULT_RESTARTS = 3

app = typer.Typer(
    cls=default_command("train"), add_completion=False, pretty_exceptions_enable=False
)
Address = Annotated[str, typer.Option(help="HOST:PORT of the Ray head, or auto.")]
JobId = Annotated[
    str | None, typer.Argument(help="As --detach printed it; default: the newest one.")
]


@app.callback()
def launch() -> None:
    """Trains on many processes and machines. `python -m launch CONFIG` is short for `train`."""


@app.command(name="train")
def train_command(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as for python -m pretrain.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="One rank for each.")] = 0,
    cpu_workers: Annotated[
        int, typer.Option(min=0, help="Ranks per node where no GPU is asked for.")
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a Ray head, or auto; default: a private one here."),
    ] = None,
    max_failures: Annotated[
        int, typer.Option(min=0, help="Restarts from the newest checkpoint after a fault.")
    ] = DEFAULT_RESTARTS,
    min_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Fewest nodes to go on with after a fault; default: all."),
    ] = None,
    wait_seconds: Annotated[
        float, typer.Option(min=0, help="After a fault: longest wait for enough nodes.")
    ] = 600.0,
    stop_seconds: Annotated[
        float, typer.Option(min=0, help="After Ctrl-C or SIGTERM: time to save a checkpoint.")
    ] = 10.0,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Where rank 0 listens; default: a free one."),
    ] = None,
    bind_cpus: Annotated[
        bool | None,
        typer.Option(help="Keep each rank to processors near its GPU; default: with GPUs."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave it to the cluster (Ray Jobs) and return.")
    ] = False,
) -> None:
    """Trains a run on Ray's nodes; each rank runs what python -m pretrain runs."""
    changes = overrides or []
    run = load_config(config, changes)
    request = Request(nodes=nodes, gpus_per_node=gpus_per_node, cpu_workers=cpu_workers)
    least = nodes if min_nodes is None else min_nodes
    check_request(run, request, least)
    check_run_dir(run.run_dir)
    if detach:
        options = {
            "--nodes": nodes,
            "--gpus-per-node": gpus_per_node,
            "--cpu-workers": cpu_workers,
            "--max-failures": max_failures,
            "--min-nodes": min_nodes,
            "--wait-seconds": wait_seconds,
            "--stop-seconds": stop_seconds,
            "--port": port,
        }
        words = [f"{name}={value}" for name, value in options.items() if value is not None]
        if bind_cpus is not None:
            words.append("--bind-cpus" if bind_cpus else "--no-bind-cpus")
        jobs.submit(run.run_dir, [str(config), *changes, *words], address, stop_seconds)
        return
    if address is None:  # on a cluster only the nodes need to see the data set
        checked_manifest(run, request.workers)
    stop = StopRequest(stop_seconds)
    choices = Choices(
        address=address,
        limits=Limits(max_failures=max_failures, min_nodes=least, wait_seconds=wait_seconds),
        bind=gpus_per_node > 0 if bind_cpus is None else bind_cpus,
        port=port,
    )
    try:
        train(run, [str(config), *changes], request, choices, stop)
    except KeyboardInterrupt:  # Ray makes a plain one of ours; typer would end silently
        raise stop.failure("at once") from None
    finally:
        stop.restore()


@app.command()
def status(job: JobId = None, address: Address = "auto") -> None:
    """What a detached launch is doing: step, nodes, restarts."""
    jobs.status(job, address)


@app.command()
def logs(
    job: JobId = None,
    address: Address = "auto",
    follow: Annotated[bool, typer.Option("--follow", help="Until the launch ends.")] = False,
) -> None:
    """What a detached launch has printed."""
    jobs.logs(job, address, follow)


@app.command()
def stop(job: JobId = None, address: Address = "auto") -> None:
    """Lets a detached launch save a checkpoint and end."""
    jobs.stop(job, address)


@app.command(name="list")
def list_command(address: Address = "auto") -> None:
    """The launches that a cluster knows."""
    jobs.list_all(address)


def main() -> None:
    """The command line; ends the process."""
    code = run()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody may be there to read it
            stream.flush()
    os._exit(code)  # Ray's threads have crashed processes at the interpreter's end


def run() -> int:
    """The command line; user errors become one line and exit code 2."""
    try:
        return run_command_line(module_app if FLAG in sys.argv[1:] else app)
    except LaunchFailed as error:
        message, code = str(error), error.code
    except (OSError, ValueError) as error:
        message, code = str(error), 2
    for line in message.splitlines():
        complain(f"error: {line}")
    return code


if __name__ == "__main__":
    main()
