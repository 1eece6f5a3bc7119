"""The shell scripts: shellcheck, and the mistakes that they refuse before they start anything. And
what they wait with."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "launch").rglob("*.sh")), *sorted((ROOT / "launch").rglob("*.sbatch"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert os.access(script, os.X_OK)


def test_both_scripts_are_there() -> None:
    assert [path.name for path in SCRIPTS] == ["ssh_cluster.sh", "slurm.sbatch"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("up", "{no}"), "no list of hosts: got {no}"),
        (("up", "{empty}"), "no host in the list: got {empty}"),
        (("up", "{twice}"), "a host is listed twice: got a;"),
        (("down", "{hosts}", "--port", "80"), "--port is no port: got 80"),
        (("up", "{hosts}", "--port", "many"), "--port is no port: got many"),
        (("up", "{hosts}", "--bogus"), "unknown option: got --bogus"),
        (("up", "{hosts}", "--venv"), "--venv has no value"),
    ],
)
def test_mistakes_in_the_list_of_hosts_are_one_line(
    tmp_path: Path, argv: tuple[str, ...], message: str
) -> None:
    files = {name: str(tmp_path / name) for name in ("no", "empty", "twice", "hosts")}
    (tmp_path / "empty").write_text("\n# nobody\n")
    (tmp_path / "twice").write_text("a\nb\n\ta 10.0.0.3\n")
    (tmp_path / "hosts").write_text("a\n")
    done = subprocess.run(
        [ROOT / "launch" / "ssh_cluster.sh", *(word.format(**files) for word in argv)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message.format(**files)}")


@pytest.mark.parametrize(
    ("environment", "argv", "message"),
    [
        ({}, ["CONFIG"], "not inside a Slurm job"),
        ({"SLURM_JOB_ID": "7"}, [], "no config"),
        ({"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/"}, ["CONFIG"], "not in the repository"),
        ({"SLURM_JOB_ID": "7", "VENV": "/nowhere"}, ["CONFIG"], "no ray in the environment"),
    ],
)
def test_a_batch_script_that_cannot_run_says_why(
    environment: dict[str, str], argv: list[str], message: str
) -> None:
    done = subprocess.run(
        [ROOT / "launch" / "slurm.sbatch", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}: got ")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("127.0.0.1:{port}", "2", "--seconds", "0"), 1, "the cluster is too small: expected 2 "),
        (("127.0.0.1:{port}", "none"), 2, "Invalid value for 'nodes'"),
    ],
)
def test_waiting_for_nodes_that_do_not_come_is_one_line(
    argv: tuple[str, ...], code: int, message: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes it
        port = probe.getsockname()[1]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "launch.wait_for_nodes"),
                *(word.format(port=port) for word in argv),
            ],
            capture_output=True,
            text=True,
            timeout=250,
            cwd=ROOT,
        )
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")
