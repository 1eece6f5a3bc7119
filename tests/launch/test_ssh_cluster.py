"""launch/ssh_cluster.sh, run for real: "hosts" are folders of this machine, and ssh is a stub that
runs the command there. The cluster then does what KubeRay asks of one: the job of rayjob.yaml."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VENV = Path(sys.prefix)

# Each host has a home of its own; the host `gone` cannot be reached.
SSH = """#!/usr/bin/env bash
while [[ $1 == -o ]]; do shift 2; done
[[ $1 != gone ]] || exit 255
export HOME=$HOMES/$1
mkdir -p "$HOME"
shift
exec bash -c "$*"
"""
NODES = """
import json
from data_prep.ray_cluster import connected
with connected({address!r}, cpus=1, env={{}}, log_to_driver=False):
    import ray
    print(json.dumps([node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"]]))
"""


def free_port() -> int:
    """The first of three ports in a row that nobody listens on."""
    while True:
        probes = [socket.socket() for _ in range(3)]
        try:
            probes[0].bind(("", 0))
            first = probes[0].getsockname()[1]
            if first > 65_000:
                continue
            for offset in (1, 2):
                probes[offset].bind(("", first + offset))
            return int(first)
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()


@pytest.fixture
def homes() -> Iterator[Path]:
    """Homes of the hosts; in a short folder."""
    folder = Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def cluster(tmp_path: Path, homes: Path) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """cluster(action, hosts, *options): (exit code, stdout, stderr); it ends with the test."""
    stub = tmp_path / "stubs" / "ssh"
    stub.parent.mkdir()
    stub.write_text(SSH)
    stub.chmod(0o755)
    port = str(free_port())

    def run(action: str, hosts: str, *options: str) -> tuple[int, str, str]:
        (tmp_path / "hosts").write_text(hosts)
        done = subprocess.run(
            [ROOT / "launch/ssh_cluster.sh", action, tmp_path / "hosts", "--port", port, *options],
            capture_output=True,
            text=True,
            timeout=600,
            env={
                **os.environ,
                "PATH": f"{stub.parent}:{os.environ['PATH']}",
                "HOMES": str(homes),
                "PYTHONPATH": str(ROOT),  # as in the image
            },
        )
        return done.returncode, done.stdout, done.stderr

    run.port = port  # type: ignore[attr-defined]
    yield run
    run("down", "alpha\nbeta\n")


def test_a_host_that_cannot_be_used_is_named(
    cluster: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, error = cluster("up", "gone\n", "--venv", str(VENV))
    assert code != 0
    assert error == (
        "error: gone: ssh cannot reach it; expected that ssh gone true works without a password\n"
    )
    code, _, error = cluster("up", "alpha\n", "--venv", str(tmp_path))
    assert code != 0
    assert error.startswith(f"error: alpha: no ray in the environment: got {tmp_path}; expected")
    code, output, _ = cluster("down", "alpha\nbeta\n")
    assert code == 0
    assert sorted(output.splitlines()) == ["alpha: did not run", "beta: did not run"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_up_a_job_and_down_on_two_hosts(
    cluster: Callable[..., tuple[int, str, str]], homes: Path, config_path: Path, tmp_path: Path
) -> None:
    hosts = "# the head\nalpha 127.0.0.1\nbeta\n"
    options = ("--venv", str(VENV), "--", "--num-cpus", "1")
    tokens = [homes / host / ".ray" / "auth_token" for host in ("alpha", "beta")]
    tokens[1].parent.mkdir(parents=True)
    tokens[1].write_text("0" * 64)
    code, output, error = cluster("up", hosts, *options)
    assert code != 0
    assert output == "alpha: started\n"
    assert error.startswith("error: beta: another token is there: got ")

    tokens[1].unlink()
    code, output, error = cluster("up", hosts, *options)
    assert code == 0, error
    address = f"127.0.0.1:{cluster.port}"  # type: ignore[attr-defined]
    assert output.splitlines()[:2] == ["alpha: runs already", "beta: started"]
    assert f"--nodes 2 --gpus-per-node G --address {address} " in output.splitlines()[2]

    def nodes(home: Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", NODES.format(address=address)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)},
        )

    found = nodes(homes / "beta")
    assert json.loads(found.stdout) == [1.0, 1.0], found.stderr
    assert tokens[0].read_text() == tokens[1].read_text()
    assert {path.stat().st_mode & 0o077 for path in tokens} == {0}
    stranger = nodes(homes)  # who has no token
    assert stranger.returncode != 0
    assert "no Ray cluster answers" in stranger.stderr

    job = yaml.safe_load((ROOT / "launch/kubernetes/rayjob.yaml").read_text())
    words = shlex.split(job["spec"]["entrypoint"])
    words = [word for word in words if not word.startswith(("run_dir=", "data.dataset="))]
    gpus = words.index("--gpus-per-node")
    words[0], words[3] = sys.executable, str(config_path)
    words[gpus : gpus + 2] = ["--cpu-workers", "1"]
    dashboard = f"http://127.0.0.1:{int(cluster.port) + 2}"  # type: ignore[attr-defined]
    done = subprocess.run(
        [VENV / "bin" / "ray", "job", "submit", "--address", dashboard, "--", *words],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=homes,
        env={**os.environ, "HOME": str(homes / "alpha"), "RAY_AUTH_MODE": "token"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    latest = tmp_path / "run" / "checkpoints" / "latest"
    assert latest.read_text().strip() == "step-00000006"

    code, output, _ = cluster("down", hosts)
    assert code == 0
    assert sorted(output.splitlines()) == ["alpha: stopped", "beta: stopped"]
    assert not list(Path("/tmp").glob(f"fenwick-cluster-*-{cluster.port}"))  # type: ignore[attr-defined]
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(address[10:])), 5):
        pass
