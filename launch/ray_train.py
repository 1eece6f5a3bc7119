"""Training through Ray Train V2: worker groups, restarts, and the one line that says what went
wrong."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.cluster import Request, cluster
from launch.errors import LaunchFailed
from launch.output import worker_lines_only
from launch.stop import StopRequest
from launch.worker import TrainingStopped, run_pretrain
from pretrain.config import STOP_FILE, RunConfig

USER_ERROR = 2
RUN_TIME_FAILURE = 1
STOPPED_BY_SIGNAL = 128
"""Exit codes from here on: pretrain saved a checkpoint and ended, as it was asked to."""


def check_request(config: RunConfig, request: Request) -> None:
    """ValueError where the config cannot run on the processes asked for; no Ray is needed to
    tell."""
    rows = request.workers * config.batch.micro_batch_rows
    if request.workers < 1:
        raise ValueError(
            "no worker to start: got --gpus-per-node 0 and --cpu-workers 0; expected at least 1; "
            "raise one of them"
        )
    if config.batch_rows % rows:
        raise ValueError(
            f"batch.batch_tokens does not spread over {request.workers} workers: got "
            f"{config.batch.batch_tokens}; expected a multiple of {rows * config.data.seq_len} "
            "(workers * batch.micro_batch_rows * data.seq_len); change it or the number of workers"
        )
    device = config.parallel.device
    if device == "cuda" and request.gpus_per_node == 0:
        raise ValueError(
            "parallel.device is cuda but no GPU is asked for: got --gpus-per-node 0; expected at "
            "least 1; raise it or set parallel.device=auto"
        )
    if device == "cpu" and request.gpus_per_node > 0:
        raise ValueError(
            f"parallel.device is cpu but GPUs are asked for: got --gpus-per-node "
            f"{request.gpus_per_node}; expected 0; lower it or set parallel.device=auto"
        )


def train(
    config: RunConfig,
    argv: Sequence[str],
    request: Request,
    *,
    address: str | None,
    max_failures: int,
    stop_seconds: float,
) -> None:
    """Runs `python -m pretrain *argv` on `request.workers` processes until it is complete.

    A worker that dies takes its group down; a new group starts and pretrain resumes from the newest
    complete checkpoint of the run folder, at most `max_failures` times. A wrong setting (pretrain's
    exit code 2) is not tried again, nor is a run that saved and ended because it was asked to or
    its time was over. Ray stores nothing but its own bookkeeping. SIGINT or SIGTERM lets the
    workers save a checkpoint, for at most `stop_seconds`; a second one does not wait.

    Raises:
        ValueError, ConnectionError: see launch.cluster.cluster.
        LaunchFailed: training stopped.
    """
    stop = StopRequest(config.run_dir / STOP_FILE, stop_seconds)
    with worker_lines_only(), cluster(request, address) as private_folder, stop:
        # Ray wants a folder that all nodes share; the run folder holds only what pretrain writes.
        parent = private_folder or config.run_dir.resolve().parent
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(max_failures + 1):
            with tempfile.TemporaryDirectory(prefix=".launch-", dir=parent) as storage:
                failure = _run_once(argv, request, Path(storage), stop)
            if failure is None:
                return
            final = failure.code == USER_ERROR or failure.code >= STOPPED_BY_SIGNAL
            if final or stop.requested or attempt == max_failures:
                raise failure
            print(
                f"{failure}; starting again from the newest checkpoint of {config.run_dir} "
                f"({attempt + 1} of {max_failures})",
                file=sys.stderr,
                flush=True,
            )


def _run_once(
    argv: Sequence[str], request: Request, storage: Path, stop: StopRequest
) -> LaunchFailed | None:
    from ray.train import RunConfig as RayRunConfig
    from ray.train import ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    with_gpus = request.gpus_per_node > 0
    trainer = TorchTrainer(
        run_pretrain,
        train_loop_config={"working_directory": os.getcwd(), "argv": list(argv)},
        torch_config=TorchConfig(backend="nccl" if with_gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=request.workers,
            use_gpu=with_gpus,
            resources_per_worker={"CPU": 1, "GPU": 1} if with_gpus else {"CPU": 1},
            placement_strategy="PACK",
        ),
        run_config=RayRunConfig(name="run", storage_path=str(storage)),
    )
    outcome: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except TrainingFailedError as error:
            outcome.append(describe_failure(getattr(error, "worker_failures", {}), error))
        except BaseException as error:  # handed to the thread that waits
            outcome.append(error)

    # Not in the main thread: there fit() takes SIGINT over, and Ctrl-C would not end what we began.
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.5)
        if stop.expired:
            return stop.failure("before its workers had saved a checkpoint")
    if not outcome:
        return None
    if isinstance(outcome[0], LaunchFailed):
        stopped_as_asked = stop.requested and outcome[0].code >= STOPPED_BY_SIGNAL
        return stop.failure("after a checkpoint") if stopped_as_asked else outcome[0]
    raise outcome[0]


def describe_failure(failures: Mapping[int, Any], error: BaseException) -> LaunchFailed:
    """The error and an exit code from what Ray reports of a stopped worker group.

    Several ranks fail when one does: the others lose their peer. First comes pretrain's own
    message, then a process that vanished, then whatever else the lowest rank raised.
    """
    causes = {rank: getattr(e, "_base_exc", e) for rank, e in sorted(failures.items())}
    stopped = {r: c for r, c in causes.items() if isinstance(c, TrainingStopped)}
    for rank, cause in sorted(stopped.items(), key=lambda item: not item[1].message):
        message = cause.message or f"rank {rank} ended with exit code {cause.code}"
        told_apart = cause.code == USER_ERROR or cause.code >= STOPPED_BY_SIGNAL
        code = cause.code if told_apart else RUN_TIME_FAILURE
        return LaunchFailed(message, code)
    for rank, cause in causes.items():
        if "Actor" in type(cause).__name__ or "HealthCheck" in type(cause).__name__:
            return LaunchFailed(
                f"training stopped: the process of rank {rank} died (killed, or out of memory)",
                RUN_TIME_FAILURE,
            )
    for rank, cause in causes.items():
        first = (str(cause).strip().splitlines() or [""])[0]
        return LaunchFailed(
            f"training failed on rank {rank}: {type(cause).__name__}: {first}",
            RUN_TIME_FAILURE,
        )
    last = (str(error).strip().splitlines() or [""])[-1]
    return LaunchFailed(f"Ray could not run the training: {last}", RUN_TIME_FAILURE)
