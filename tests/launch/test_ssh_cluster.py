"""launch/ssh_cluster.sh, run for real: "hosts" are folders of this machine, and ssh is a stub that
runs the command there. The cluster then does what clusters are for: the job of rayjob.yaml, and
evaluation and data preparation through `--module`."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VENV = Path(sys.prefix)
HOSTS = "# the head\nalpha 127.0.0.1\nbeta\n"
OPTIONS = ("--venv", str(VENV), "--", "--num-cpus", "1")

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
import json, sys
from data_prep.ray_cluster import connected
with connected(sys.argv[1], cpus=1, env={}, log_to_driver=False):
    import ray
    print(json.dumps([node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"]]))
"""


def free_port() -> int:
    """The first of three ports in a row that nobody listens on."""
    while True:
        probes = [socket.socket() for _ in range(3)]
        try:
            probes[0].bind(("", 0))
            first = int(probes[0].getsockname()[1])
            if first > 65_000:
                continue
            for offset in (1, 2):
                probes[offset].bind(("", first + offset))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()


@dataclass(frozen=True)
class Cluster:
    """The script with the hosts' homes and a port of its own."""

    folder: Path
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def home(self, host: str) -> Path:
        return self.folder / host

    def script(self, action: str, hosts: str, *options: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of launch/ssh_cluster.sh."""
        (self.folder / "hosts").write_text(hosts)
        done = subprocess.run(
            [
                ROOT / "launch" / "ssh_cluster.sh",
                action,
                self.folder / "hosts",
                "--port",
                str(self.port),
                *options,
            ],
            capture_output=True,
            text=True,
            timeout=600,
            env={
                **os.environ,
                "PATH": f"{self.folder}/stubs:{os.environ['PATH']}",
                "HOMES": str(self.folder),
                "PYTHONPATH": str(ROOT),  # as in the image for Kubernetes
            },
        )
        return done.returncode, done.stdout, done.stderr

    def run(
        self, *argv: object, host: str = "alpha", **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """A command of the environment, as the user of this host types it."""
        return subprocess.run(
            [VENV / "bin" / str(argv[0]), *map(str, argv[1:])],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=ROOT,
            env={
                **os.environ,
                "HOME": str(self.home(host)),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nothing runs yet; what does at the end is ended."""
    folder = Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))
    stub = folder / "stubs" / "ssh"
    stub.parent.mkdir()
    stub.write_text(SSH)
    stub.chmod(0o755)
    cluster = Cluster(folder, free_port())
    yield cluster
    cluster.script("down", HOSTS)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def two_hosts(cluster: Cluster) -> Iterator[Cluster]:
    """Up, at the second attempt."""
    token = cluster.home("beta") / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("0" * 64)
    code, output, error = cluster.script("up", HOSTS, *OPTIONS)
    assert code != 0
    assert output == "alpha: started\n", error
    assert error.startswith("error: beta: another token is there: got ")

    token.unlink()
    code, output, error = cluster.script("up", HOSTS, *OPTIONS)
    assert code == 0, error
    assert output.splitlines()[:2] == ["alpha: runs already", "beta: started"]
    assert f" --nodes 2 --gpus-per-node G --address {cluster.address} " in output.splitlines()[2]
    yield cluster

    code, output, _ = cluster.script("down", HOSTS)
    assert code == 0
    assert sorted(output.splitlines()) == ["alpha: stopped", "beta: stopped"]
    assert not list(Path("/tmp").glob(f"fenwick-cluster-*-{cluster.port}"))
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", cluster.port), 5):
        pass


def test_a_host_that_cannot_be_used_is_named(cluster: Cluster, tmp_path: Path) -> None:
    code, _, error = cluster.script("up", "gone\n", "--venv", str(VENV))
    assert code != 0
    assert error == (
        "error: gone: ssh cannot reach it; expected that ssh gone true works without a password\n"
    )
    code, _, error = cluster.script("up", "alpha\n", "--venv", str(tmp_path))
    assert code != 0
    assert error.startswith(f"error: alpha: no ray in the environment: got {tmp_path}; expected")
    state = Path(f"/tmp/fenwick-cluster-{os.getuid()}-{cluster.port}") / "alpha"
    state.mkdir(parents=True)
    (state / "pid").write_text(str(os.getpid()))  # as after a restart: a number that is another's
    code, output, _ = cluster.script("down", HOSTS)
    assert code == 0
    assert sorted(output.splitlines()) == ["alpha: did not run", "beta: did not run"]
    assert not state.parent.exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_who_has_the_token_sees_both_hosts_and_nobody_else_does(two_hosts: Cluster) -> None:
    tokens = [two_hosts.home(host) / ".ray" / "auth_token" for host in ("alpha", "beta")]
    assert tokens[0].read_text() == tokens[1].read_text()
    assert {path.stat().st_mode & 0o077 for path in tokens} == {0}
    found = two_hosts.run("python", "-c", NODES, two_hosts.address, host="beta")
    assert json.loads(found.stdout) == [1.0, 1.0], found.stderr
    stranger = two_hosts.run("python", "-c", NODES, two_hosts.address, host="stranger")
    assert stranger.returncode != 0
    assert "no Ray cluster answers" in stranger.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_job_of_the_kubernetes_manifest_trains_and_its_checkpoints_are_evaluated(
    two_hosts: Cluster, config_path: Path, dataset: Path, tmp_path: Path
) -> None:
    job = yaml.safe_load((ROOT / "launch" / "kubernetes" / "rayjob.yaml").read_text())
    words = shlex.split(job["spec"]["entrypoint"])
    words = [word for word in words if not word.startswith(("run_dir=", "data.dataset="))]
    gpus = words.index("--gpus-per-node")
    words[0], words[3] = sys.executable, str(config_path)
    words[gpus : gpus + 2] = ["--cpu-workers", "1"]
    dashboard = f"http://127.0.0.1:{two_hosts.port + 2}"
    submit = ("ray", "job", "submit", "--address", dashboard, "--", *words)
    done = two_hosts.run(*submit, RAY_AUTH_MODE="token")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-00000006"

    argv = ["-m", "launch", "--module", "eval", run, "--all-checkpoints", "--tasks", "perplexity"]
    argv += ["--dataset", dataset, "--address", two_hosts.address]
    done = two_hosts.run("python", *argv)
    assert done.returncode == 0, done.stderr
    steps = [path.name for path in sorted((run / "checkpoints").glob("step-*"))]
    assert len(steps) > 1
    assert f"{len(steps)} of {len(steps)} units" in done.stderr
    for step in steps:
        results = json.loads((run / "eval" / step / "results.json").read_text())["results"]
        assert {result["task"] for result in results} == {"perplexity"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_data_is_prepared_on_the_cluster(two_hosts: Cluster, dataset: Path, tmp_path: Path) -> None:
    corpus = Path(sysconfig.get_path("stdlib"), "json")
    argv = ["pack", corpus, "--include", "*.py", "--tokenizer", dataset / "tokenizer.model"]
    argv += ["--validation", corpus.with_name("bisect.py"), "--row-tokens", 32, "--output"]
    there = ("--address", two_hosts.address, "--nodes", 2, "--cpu-workers", 1)
    done = two_hosts.run(
        "python", "-m", "launch", "--module", "data_prep", *argv, tmp_path / "there", *there
    )
    assert done.returncode == 0, done.stderr
    done = two_hosts.run("python", "-m", "data_prep", *argv, tmp_path / "here", "--workers", 1)
    assert done.returncode == 0, done.stderr
    index = Path("train") / "index.json"
    assert (tmp_path / "there" / index).read_bytes() == (tmp_path / "here" / index).read_bytes()
