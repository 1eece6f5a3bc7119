import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data_prep.ray_cluster import remove_stale_folders
from launch import __main__ as command
from launch.cluster import Request
from launch.ray_train import check_request, describe_failure
from launch.worker import TrainingStopped
from pretrain.config import load_config


@pytest.fixture
def start():
    """start(*argv): a launch in a process group of its own; it ends with the test."""
    started = []

    def run(*argv):
        command = [sys.executable, "-m", "launch", *map(str, argv)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def folders_of(process):
    """Private cluster folders of a launch that are still there."""
    return list(Path("/tmp").glob(f"fenwick-ray-{process.pid}-*"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--gpus-per-node", "2"), "parallel.device is cpu but GPUs are asked for"),
        (("--cpu-workers", "0"), "no worker to start"),
        (
            ("--cpu-workers", "3"),
            "does not spread over 3 workers: got 128; expected a multiple of 192",
        ),
        (("parallel.device=cuda",), "no GPU is asked for"),
        (("--nodes", "2"), "one machine cannot be several nodes"),
        (("optimizer.peek_lr=3",), "optimizer.peak_lr"),
        (("data.dataset=nowhere",), "nowhere is not a data set"),
        (("model.vocab_size=16",), "model.vocab_size is smaller"),
        (("run_dir=pyproject.toml",), "run_dir is not a folder: got pyproject.toml"),
        (("model.mixer=log_linear_mamba3",), "did you mean log_linear_mamba2?"),
        (("--address", "127.0.0.1:1"), "no Ray cluster answers"),
        (("--address", "nonsense"), "--address is no address"),
    ],
)
def test_wrong_requests_are_refused_before_ray_starts(
    monkeypatch, capsys, config_path, argv, message
):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["launch", str(config_path), *argv])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_gpus_on_a_machine_without_any_are_refused_before_ray_starts(start, config_path):
    argv = (config_path, "--gpus-per-node", "64", "parallel.device=auto", "batch.batch_tokens=4096")
    began = time.monotonic()
    process = start(*argv)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.splitlines()[-1].startswith("error: not enough GPUs here: got --gpus-per-node 64")
    assert time.monotonic() - began < 30


def test_check_request_accepts_what_fits(config_path):
    config = load_config(config_path)
    check_request(config, Request(nodes=1, gpus_per_node=0, cpu_workers=2))


class ActorDiedError(Exception):
    pass


@pytest.mark.parametrize(
    ("failures", "message", "code"),
    [
        ({0: TrainingStopped(2, "bad setting"), 1: TrainingStopped(2, "")}, "bad setting", 2),
        ({0: RuntimeError("gloo"), 1: TrainingStopped(1, "disk full")}, "disk full", 1),
        ({0: TrainingStopped(3, "")}, "rank 0 ended with exit code 3", 1),
        ({0: RuntimeError("peer closed"), 1: ActorDiedError()}, "process of rank 1 died", 1),
        ({1: KeyError("x"), 0: ValueError("y\nz")}, "failed on rank 0: ValueError: y", 1),
        ({}, "Ray could not run the training: last", 1),
    ],
)
def test_failures_become_one_line_that_names_the_cause(failures, message, code):
    got = describe_failure(failures, RuntimeError("first\nlast"))
    assert message in str(got)
    assert "\n" not in str(got)
    assert got.code == code


@pytest.mark.slow
def test_two_workers_train_and_a_second_launch_finds_it_complete(start, config_path, tmp_path):
    process = start(config_path, "--cpu-workers", "2")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if "loss" in s] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "checkpoints" / "step-00000006" / "checkpoint.json").is_file()
    assert "RayTrainWorker" not in output
    assert "TrainController" not in output
    assert not folders_of(process)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "run.yaml"}
    again, _ = start(config_path, "--cpu-workers", "2").communicate(timeout=240)
    assert "is complete: step 6/6" in again


@pytest.mark.slow
def test_killed_worker_is_started_again_from_the_checkpoint(start, config_path, tmp_path):
    process = start(config_path, "--max-failures", "1", "training.total_steps=400")
    victim = None
    deadline = time.monotonic() + 120
    while victim is None and time.monotonic() < deadline:
        time.sleep(0.2)
        if (tmp_path / "run" / "checkpoints" / "latest").exists():
            for child in psutil.Process(process.pid).children(recursive=True):
                if "RayTrainWorker" in " ".join(child.cmdline()):
                    victim = child
    assert victim is not None
    victim.kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "died (killed, or out of memory); starting again" in output
    assert "resuming" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)],
)
def test_a_stopped_launch_leaves_no_process(start, config_path, tmp_path, number, to_group):
    """SIGINT goes to the whole foreground group, as a terminal sends it."""
    process = start(config_path, "training.total_steps=100000")
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "log.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    (os.killpg if to_group else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert output.splitlines()[-1].startswith(f"error: stopped by {number.name} after a")
        newest = (tmp_path / "run" / "checkpoints" / "latest").read_text().strip()
        assert f"saved {tmp_path}/run/checkpoints/{newest}" in output
    # After SIGKILL of the launcher Ray notices by itself; its agents take a minute.
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive
    if number == signal.SIGKILL:
        assert folders_of(process)
        remove_stale_folders()
    assert not folders_of(process)
