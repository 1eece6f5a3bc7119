"""Launches that the cluster runs itself: submitted through Ray Jobs, asked after, stopped.

The job is the same command on the head node. Its output is kept by Ray, what happened to it by
RUN/logs/launch.json.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.ray_cluster import ROOT, set_environment
from launch.environment import passed_on
from launch.record import read_record
from launch.supervisor import last_step
from models.checkpoint_directory import newest_complete
from pretrain.config import load_config

RUN_DIR = "fenwick_run_dir"
"""In a job's metadata; tells our jobs from others."""
CONFIG = "config.yaml"
CLEAN_UP_SECONDS = 20
STOP_SECONDS = 300.0


def submit(run_dir: Path, arguments: Sequence[str], address: str | None, seconds: float) -> None:
    """Submits `python -m launch *arguments` and prints the job's id and what to do with it.

    Args:
        arguments: without --detach and --address.
        seconds: that the launch takes for a checkpoint when it is stopped.

    Raises:
        ValueError: there is no address, or nothing answers there.
    """
    if address is None:
        raise ValueError(
            "--detach leaves the launch to a running cluster: got no --address; expected HOST:PORT "
            "of its head, or auto; start one, or leave --detach out"
        )
    client = _client(address)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    job = client.submit_job(
        entrypoint=entrypoint(arguments),
        submission_id=f"{run_dir.resolve().name}-{stamp}-{os.getpid()}",
        metadata={RUN_DIR: str(run_dir.resolve())},
        # Ray would kill it after 3 s, in the middle of its checkpoint.
        runtime_env={
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(int(seconds) + CLEAN_UP_SECONDS)}
        },
    )
    print(f"{job} is submitted; it trains in {run_dir}")
    for command in ("status", "logs --follow", "stop"):
        print(f"  python -m launch {command} {job} --address {address}")


def entrypoint(arguments: Sequence[str]) -> str:
    """The shell's command of a job: the same launch, from the same folder, on the head node."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": os.pathsep.join(paths), **passed_on(os.environ)}
    settings = [f"{name}={text}" for name, text in variables.items()]
    command = [sys.executable, "-m", "launch", *arguments, "--address", "auto"]
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*settings, *command])}"


def status(job: str | None, address: str) -> None:
    """Prints the state of a launch: Ray's, the run's, and the faults so far."""
    details = _find(_client(address), job)
    run_dir = Path(details.metadata[RUN_DIR])
    print(f"{details.submission_id}: {details.status.value.lower()}; {run_dir}")
    if details.status.value == "FAILED":
        print(f"  {(details.message or '').splitlines()[0]}")
    step, total = last_step(run_dir), "?"
    if (run_dir / CONFIG).is_file():
        total = str(load_config(run_dir / CONFIG).training.total_steps)
    newest, _ = newest_complete(run_dir, hashes=False)
    print(f"  step {step}/{total}; newest checkpoint {newest.name if newest else 'none'}")
    record = read_record(run_dir)
    if record is None:
        return
    if record["starts"]:
        last = record["starts"][-1]
        print(f"  {record['state']}: {last['ranks']} ranks on {', '.join(last['nodes'])}")
    for failure in record["failures"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["time"]))
        print(f"  fault at step {failure['step']}, {when}: {failure['message'].splitlines()[0]}")


def logs(job: str | None, address: str, follow: bool) -> None:
    """Prints what a launch has printed; with `follow` until it ends."""
    client = _client(address)
    name = _find(client, job).submission_id
    if not follow:
        print(client.get_job_logs(name), end="")
        return

    async def pass_on() -> None:
        async for text in client.tail_job_logs(name):
            print(text, end="", flush=True)

    asyncio.run(pass_on())


def stop(job: str | None, address: str) -> None:
    """Asks a launch to save and end; returns when it has."""
    client = _client(address)
    name = _find(client, job).submission_id
    client.stop_job(name)
    deadline = time.monotonic() + STOP_SECONDS
    while not (state := client.get_job_status(name)).is_terminal():
        if time.monotonic() > deadline:
            raise ValueError(
                f"{name} does not end: got {state.value.lower()} after {STOP_SECONDS:.0f} s; "
                "expected an end; look at its logs"
            )
        time.sleep(0.5)
    print(f"{name}: {state.value.lower()}")


def list_all(address: str) -> None:
    """Prints a line for every launch, the newest first."""
    for details in _ours(_client(address)):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((details.start_time or 0) / 1000))
        state = details.status.value.lower()
        print(f"{details.submission_id}  {state:<9}  {when}  {details.metadata[RUN_DIR]}")


def _client(address: str) -> Any:
    """A client of the cluster's job server. ValueError where none answers."""
    from ray.job_submission import JobSubmissionClient

    os.environ.pop("RAY_ADDRESS", None)  # it would go before what the user says
    set_environment(private=False)
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(
            f"no Ray job server answers: got {lines[-1] if lines else error} at {address}; "
            "expected a Ray head with its dashboard; start one with `ray start --head`"
        ) from None


def _ours(client: Any) -> list[Any]:
    """Details of our jobs, the newest first."""
    ours = [d for d in client.list_jobs() if d.submission_id and RUN_DIR in (d.metadata or {})]
    return sorted(ours, key=lambda details: details.start_time or 0, reverse=True)


def _find(client: Any, job: str | None) -> Any:
    """Details of a job, the newest without an id. ValueError where there is none."""
    ours = _ours(client)
    for details in ours:
        if job in (None, details.submission_id):
            return details
    known = ", ".join(details.submission_id for details in ours[:5]) or "none"
    raise ValueError(
        f"no such launch: got {job or 'no id'}; expected one of {known}; see python -m launch list"
    )
