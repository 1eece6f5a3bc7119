"""`python -m launch.wait_for_nodes HOST:PORT N`: returns when a Ray cluster has so many nodes.

For job scripts: a scheduler starts Ray on all machines at once, and they come one after the other.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from data_prep.command_line import run_command_line
from data_prep.ray_cluster import connected

POLL_SECONDS = 1.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def wait_for_nodes(
    address: Annotated[
        str, typer.Argument(help="HOST:PORT of the head; runs on one of the nodes.")
    ],
    nodes: Annotated[int, typer.Argument(min=1, help="How many to wait for.")],
    seconds: Annotated[float, typer.Option(min=0, help="How long.")] = 300.0,
) -> None:
    """Waits until the cluster has so many nodes; exit code 1 where it never does."""
    deadline = time.monotonic() + seconds
    problem = f"no Ray answers at {address}"
    while True:
        try:
            with connected(address, cpus=1, env={}, log_to_driver=False):
                import ray

                while True:
                    alive = sorted(n["NodeName"] for n in ray.nodes() if n["Alive"])
                    if len(alive) >= nodes:
                        print(f"{address}: {len(alive)} nodes: {' '.join(alive)}", flush=True)
                        return
                    problem = f"only {len(alive)} came: {' '.join(alive)}"
                    if time.monotonic() > deadline:
                        break
                    time.sleep(POLL_SECONDS)
        except ValueError as error:  # the head is not there yet
            problem = str(error)
        if time.monotonic() > deadline:
            print(
                f"error: the cluster is too small: expected {nodes} nodes at {address} within "
                f"{seconds:.0f} s; {problem}",
                file=sys.stderr,
            )
            raise typer.Exit(1)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(run_command_line(app))
