"""launch/slurm.sbatch with stubs of srun and scontrol, a real Ray of two nodes on this machine and
a real training: the time limit, the requeue, the end."""

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
trap 'kill -TERM $(jobs -p) 2>/dev/null' TERM
while [[ $1 == --* ]]; do
    [[ $1 != --ntasks=* ]] || tasks=${1#*=}
    shift
done
for ((node = 0; node < tasks; node++)); do SLURM_NODEID=$node "$@" & done
while [[ -n $(jobs -pr) ]]; do wait; done
"""
# Every node is this machine.
SCONTROL = """#!/usr/bin/env bash
case $1 in
show) printf '127.0.0.1\\n127.0.0.1\\n' ;;
requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """submit(*argv, **environment): the batch script as Slurm starts it; it ends with the test."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
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
