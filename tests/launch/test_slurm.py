"""launch/slurm.sbatch with stubs of srun and scontrol. Once with a real Ray of two nodes on this
machine and a real training: the time limit, the requeue, the end. And with stubs of these too: what
each end of the launcher leads to."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm.sbatch"
VENV = Path(sys.prefix)
OPTIONS = ("--cpu-workers", "1", "schedule.kind=constant")

# Runs the command once for every node, all of them here, as tasks of one job step.
SRUN = """#!/usr/bin/env bash
trap 'stopped=1; kill -TERM $(jobs -p) 2>/dev/null' TERM
while [[ $1 == --* ]]; do
    [[ $1 != --ntasks=* ]] || tasks=${1#*=}
    shift
done
for ((node = 0; node < tasks; node++)); do
    if [[ -z $stopped ]]; then SLURM_NODEID=$node "$@" & fi
done
[[ -z $stopped ]] || kill -TERM $(jobs -p) 2>/dev/null
while [[ -n $(jobs -pr) ]]; do wait; done
"""
# Every node is this machine.
SCONTROL = """#!/usr/bin/env bash
case $1 in
show) printf '127.0.0.1\\n127.0.0.1\\n' ;;
requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""

# An environment whose launcher writes how it was called, says that it runs, and ends as told.
PYTHON = """#!/usr/bin/env bash
case "$*" in
*launch.wait_for_nodes*)
    until [[ -s $CALLED.ray ]]; do sleep 0.05; done
    [[ -z ${SLOW_NODES:-} ]] || exec sleep 60
    ;;
*"-m launch "*)
    echo "$RAY_AUTH_MODE $*" >"$CALLED"
    trap 'exit "$WHEN_ASKED"' TERM
    [[ -n $WHEN_ALONE ]] && exit "$WHEN_ALONE"
    while :; do sleep 0.1; done
    ;;
*) echo token ;;
esac
"""
RAY = """#!/usr/bin/env bash
echo "$*" >>"$CALLED.ray"
exec sleep 60
"""


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """submit(*argv, **environment): the batch script as Slurm starts it; it ends with the test."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for path, text in (
        (stubs / "srun", SRUN),
        (stubs / "scontrol", SCONTROL),
        (tmp_path / "venv" / "bin" / "python", PYTHON),
        (tmp_path / "venv" / "bin" / "ray", RAY),
    ):
        path.write_text(text)
        path.chmod(0o755)
    started = []

    def start(*argv: object, **environment: str) -> "subprocess.Popen[str]":
        job = str(os.getpid())  # decides the ports
        process = subprocess.Popen(
            [SCRIPT, *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PATH": f"{stubs}:{os.environ['PATH']}",
                "REQUEUED": str(tmp_path / "requeued"),
                "SLURM_SUBMIT_DIR": str(ROOT),
                "SLURM_JOB_ID": job,
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "node[1-2]",
                "SLURM_CPUS_ON_NODE": "1",
                "VENV": str(VENV),
                **environment,
            },
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
    (ROOT / f"fenwick-{os.getpid()}-ray.log").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("sent", "alone", "asked", "environment", "code", "queued"),
    [
        (None, "0", "0", {}, 0, False),
        (None, "1", "0", {}, 1, False),
        (None, "2", "0", {}, 2, False),
        (None, "142", "0", {}, 142, True),  # training.time_limit_minutes
        (signal.SIGUSR1, "", "143", {}, 143, True),
        (signal.SIGUSR1, "", "0", {}, 0, False),  # it was complete at that moment
        (signal.SIGUSR1, "", "1", {}, 1, False),
        (signal.SIGTERM, "", "143", {}, 143, False),  # scancel
        (signal.SIGUSR1, "", "143", {"SLURM_RESTART_COUNT": "3"}, 143, True),
        (
            signal.SIGUSR1,
            "",
            "143",
            {"SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "3"},
            1,
            False,
        ),
        (signal.SIGUSR1, "", "143", {"SLOW_NODES": "1"}, 143, True),  # before Ray is there
    ],
)
def test_what_an_end_of_the_launcher_leads_to(
    submit: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    sent: signal.Signals | None,
    alone: str,
    asked: str,
    environment: dict[str, str],
    code: int,
    queued: bool,
) -> None:
    called = tmp_path / "called"
    job = submit(
        "CONFIG",
        "seed=1",
        VENV=str(tmp_path / "venv"),
        SLURM_GPUS_ON_NODE="8",
        CALLED=str(called),
        WHEN_ALONE=alone,
        WHEN_ASKED=asked,
        **environment,
    )
    begun = called.with_name("called.ray") if "SLOW_NODES" in environment else called
    deadline = time.monotonic() + 60
    while not begun.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    if sent is not None:
        time.sleep(0.3)  # the stub sets its trap
        job.send_signal(sent)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == code, output
    assert (tmp_path / "requeued").is_file() == queued
    assert ("error: queued too often: got 3 times" in output) == ("MAX_REQUEUES" in environment)
    if "SLOW_NODES" not in environment:
        mode, *words = called.read_text().split()
        assert mode == "token"
        address = words[-1]
        assert words == [
            *("-m", "launch", "--stop-seconds", "240", "CONFIG", "seed=1"),
            *("--nodes", "2", "--gpus-per-node", "8", "--address", address),
        ]
        # The other node's waits for a head that answers.
        (start,) = called.with_name("called.ray").read_text().splitlines()
        assert start.startswith("start --block --disable-usage-stats --num-gpus 8 --num-cpus 1 ")
        assert " --head --port " + address.split(":")[1] in start


def steps(run: Path) -> list[int]:
    lines: list[dict[str, Any]] = []
    if (run / "log.jsonl").is_file():
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_time_limit_saves_and_queues_again_until_the_run_is_complete(
    submit: Callable[..., "subprocess.Popen[str]"], config_path: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = submit(config_path, *OPTIONS, "training.total_steps=100000")
    deadline = time.monotonic() + 400
    while len(steps(run)) < 3 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300 does: to the batch script alone
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 143, output
    assert (tmp_path / "requeued").read_text().split() == [str(os.getpid())]
    saved = int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    assert saved == steps(run)[-1] >= 3

    job = submit(config_path, *OPTIONS, f"training.total_steps={saved + 2}")
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    assert steps(run) == list(range(1, saved + 3))
    assert len((tmp_path / "requeued").read_text().split()) == 1
    assert not Path(f"/tmp/fenwick-slurm-{os.getpid()}").exists()
