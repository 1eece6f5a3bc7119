import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from launch import __main__ as command
from launch.cluster import Request
from launch.training import check_request
from pretrain.config import load_config


@pytest.fixture
def start():
    """start(*argv): a launch in a process group of its own; it ends with the test."""
    started = []

    def run(*argv, environment=None):
        command = [sys.executable, "-m", "launch", *map(str, argv)]
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
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
            "batch.batch_tokens does not split evenly: got 128; expected a multiple of",
        ),
        (("parallel.device=cuda",), "no GPU is asked for"),
        (("--nodes", "2"), "one machine cannot be several nodes"),
        (("--min-nodes", "2"), "--min-nodes is more than --nodes: got 2; expected at most 1"),
        (("--detach",), "--detach leaves the launch to a running cluster: got no --address"),
        (("--no-such-option",), "error: No such option: --no-such-option; see --help"),
        (("--nodes", "two"), "error: Invalid value for '--nodes'"),
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
    assert command.run() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


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
    check_request(config, Request(nodes=1, gpus_per_node=0, cpu_workers=2), min_nodes=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGKILL, False)],
)
def test_a_stopped_launch_leaves_no_process(start, config_path, tmp_path, number, to_group):
    """SIGINT goes to the whole foreground group, as a terminal sends it, SIGTERM as batch systems
    may: the launch's own Ray is not in it."""
    process = start(config_path, "--cpu-workers=2", "training.total_steps=100000")
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
        assert f"rank 0: saved {tmp_path}/run/checkpoints/{newest}" in output
        assert "pid=" not in output  # of Ray's own
        assert "rank 0: step 1/" in output
        for rank in (0, 1):
            assert (tmp_path / "run" / "logs" / f"rank-{rank:05d}.log").is_file()
        assert {p.name for p in tmp_path.iterdir()} == {"run", "run.yaml"}
    _, alive = psutil.wait_procs(family, timeout=30)  # the guard of the launch's own Ray is one
    assert not alive
    assert not folders_of(process)


@pytest.mark.slow
def test_a_launch_whose_terminal_closes_saves_and_ends(config_path, tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "launch", str(config_path), "--cpu-workers=2"]
    process = subprocess.Popen(
        [*command, "training.total_steps=100000"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(theirs)
        shown = b""
        while b"step 1/" not in shown:
            shown += os.read(ours, 4096)  # OSError where the launch has ended
        family = psutil.Process(process.pid).children(recursive=True)
        os.close(ours)
        assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert (tmp_path / "run" / "checkpoints" / "latest").is_file()
    assert json.loads((tmp_path / "run" / "logs" / "launch.json").read_text())["state"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0, 8.0])
def test_ctrl_c_while_it_starts_leaves_no_process(start, config_path, seconds):
    """Whatever it is doing then, which on a busy machine is something earlier."""
    process = start(config_path, "--cpu-workers=2", "training.total_steps=100000")
    time.sleep(seconds)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert not folders_of(process)


@pytest.mark.slow
def test_the_error_of_the_failing_rank_is_the_last_line(start, config_path, tmp_path):
    """A mistake in the program: rank 1 meets it, rank 0 only loses its peer."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import os, sys, threading\n"
        "def strike():\n"
        "    while 'pretrain.engine' not in sys.modules: threading.Event().wait(0.05)\n"
        "    engine = sys.modules['pretrain.engine']\n"
        "    while not hasattr(engine, 'Engine'): threading.Event().wait(0.05)\n"
        "    def update(*a, **k): raise KeyError('a mistake')\n"
        "    engine.Engine.update = update\n"
        "if os.environ.get('RANK') == '1': threading.Thread(target=strike, daemon=True).start()\n"
    )
    process = start(config_path, "--cpu-workers=2", environment={"PYTHONPATH": str(tmp_path)})
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 1
    said, again = output.splitlines()[-2:]
    assert said == "error: rank 1 on node 127.0.0.1: KeyError: 'a mistake'"
    assert again == "error: the same error came twice at step 0"
    assert output.count("restart 1 of 3") == 1
    log = (tmp_path / "run" / "logs" / "rank-00001.log").read_text()
    assert log.count("raise KeyError('a mistake')") == 2
