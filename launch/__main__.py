"""`python -m launch CONFIG.yaml --nodes N --gpus-per-node G [section.key=value ...]`: train
through Ray; `--module eval ...` or `--module data_prep ...`: these on a cluster."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from pydantic import ValidationError

from data_prep.command_line import run_command_line
from launch.cluster import Request
from launch.errors import LaunchFailed
from launch.module import FLAG
from launch.module import app as module_app
from launch.ray_train import check_request, train
from pretrain.config import check_run_dir, checked_manifest, load_config

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def launch(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as for python -m pretrain.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="One worker for each.")] = 0,
    cpu_workers: Annotated[
        int, typer.Option(min=0, help="Workers per node where no GPU is asked for.")
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a Ray head, or auto; default: a private one here."),
    ] = None,
    max_failures: Annotated[
        int, typer.Option(min=0, help="Restarts from the newest checkpoint after a failure.")
    ] = 0,
    stop_seconds: Annotated[
        float, typer.Option(min=0, help="After Ctrl-C or SIGTERM: time to save a checkpoint.")
    ] = 15.0,
) -> None:
    """Train on Ray workers; each of them runs what python -m pretrain runs."""
    changes = overrides or []
    run = load_config(config, changes)
    request = Request(nodes=nodes, gpus_per_node=gpus_per_node, cpu_workers=cpu_workers)
    check_request(run, request)
    check_run_dir(run.run_dir)
    if address is None:  # on a cluster only the nodes need to see the data set
        checked_manifest(run, request.workers)
    train(
        run,
        [str(config), *changes],
        request,
        address=address,
        max_failures=max_failures,
        stop_seconds=stop_seconds,
    )


def _stop(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends the launch like Ctrl-C: what it started is shut down on the way out."""
    del frame
    sys.exit(128 + signum)


def main() -> None:
    """The command line: user errors become one line and exit code 2."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        if FLAG in sys.argv[1:]:
            sys.exit(run_command_line(module_app))
        app(standalone_mode=True)
    except ValidationError as error:
        for problem in error.errors():
            place = ".".join(map(str, problem["loc"]))
            print(f"error: {place}: {problem['msg']}: got {problem['input']!r}", file=sys.stderr)
        sys.exit(2)
    except (OSError, ValueError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except LaunchFailed as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.code)


if __name__ == "__main__":
    main()
