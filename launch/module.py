"""`python -m launch --module eval ...` and `--module data_prep pack ...`: evaluation and data
preparation on a Ray cluster.

Both spread their work over a cluster by themselves: eval every task on every checkpoint, data_prep
the units and shards of a corpus. Here the machines asked for, in the launcher's words, become their
own options, and their command line takes this process over: what they print, their errors, exit
codes, and what an interrupted command does, are theirs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

FLAG = "--module"
MODULES = ("eval", "data_prep")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    # What is no option of ours is the module's, --help too.
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }
)
def module_command(
    context: typer.Context,
    module: Annotated[str, typer.Option()],
    address: Annotated[str | None, typer.Option()] = None,
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1)] = None,
    cpu_workers: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """The launcher's options; all others are the module's."""
    spread = spread_options(module, address, nodes, gpus_per_node, cpu_workers)
    if "--help" in context.args:
        spread = []
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args, *spread])


def spread_options(
    module: str,
    address: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    cpu_workers: int | None,
) -> list[str]:
    """What the module calls the machines asked for; without numbers it takes what there is.

    Args:
        module: of MODULES.
        address: of a Ray head; None: a private Ray on this machine.
        nodes: machines, of the cluster at `address`; None: one.
        gpus_per_node: of each machine, for eval.
        cpu_workers: processes of each machine where no GPU is asked for.

    Raises:
        ValueError: they mean nothing together.
    """
    if module not in MODULES:
        raise ValueError(
            f"{FLAG} is unknown: got {module}; expected {' or '.join(MODULES)}; training needs "
            "none: python -m launch CONFIG"
        )
    if gpus_per_node is not None and (module != "eval" or cpu_workers is not None):
        other = "--cpu-workers" if module == "eval" else "data_prep, which uses none"
        raise ValueError(
            f"--gpus-per-node does not go with {other}: got {gpus_per_node}; expected one of "
            "--gpus-per-node and --cpu-workers"
        )
    per_node = gpus_per_node or cpu_workers
    if nodes is not None and per_node is None:
        raise ValueError(
            f"--nodes says nothing alone: got {nodes}; expected --gpus-per-node or --cpu-workers "
            "too; leave it out to use the whole cluster"
        )
    if address is None and (nodes or 1) > 1:
        raise ValueError(
            f"one machine cannot be several nodes: got --nodes {nodes}; expected 1 without "
            "--address; start Ray on the machines and give --address HOST:PORT"
        )
    options = [] if address is None else ["--address", address]
    if per_node is not None:
        options += ["--gpus" if gpus_per_node else "--workers", str((nodes or 1) * per_node)]
    elif address is None and module == "eval":
        options += _all_of_this_machine()
    return options


def _all_of_this_machine() -> list[str]:
    # Ray's own detection, as it counts for a private Ray.
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    gpus = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return ["--gpus", str(gpus)] if gpus else ["--workers", str(os.cpu_count() or 1)]
