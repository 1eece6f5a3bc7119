import re
import shlex
import sys
import time
from types import SimpleNamespace

import pytest

from launch import jobs
from tests.launch.hosts import Hosts


def details(name, start, ours=True):
    metadata = {jobs.RUN_DIR: f"/runs/{name}"} if ours else {}
    return SimpleNamespace(submission_id=name, start_time=start, metadata=metadata)


class Client:
    def __init__(self, *known):
        self.known = list(known)

    def list_jobs(self):
        return self.known


def test_the_newest_of_our_launches_is_meant_without_an_id():
    client = Client(details("old", 1), details("new", 3), details("other", 9, ours=False))
    assert jobs._find(client, None).submission_id == "new"
    assert jobs._find(client, "old").submission_id == "old"
    with pytest.raises(ValueError, match="no such launch: got other; expected one of new, old;"):
        jobs._find(client, "other")
    with pytest.raises(ValueError, match="got no id; expected one of none"):
        jobs._find(Client(), None)


def test_a_job_is_the_same_command_in_the_same_folder(monkeypatch, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NCCL_DEBUG", "WARN now")
    line = jobs.entrypoint(["c.yaml", "model.mixer=[mamba2, attention]", "--nodes=2"])
    cd, path, _, execute, env, *rest = shlex.split(line)
    assert (cd, path, execute, env) == ("cd", str(folder), "exec", "env")
    assert "NCCL_DEBUG=WARN now" in rest
    assert rest[rest.index(sys.executable) :] == [
        *(sys.executable, "-m", "launch", "c.yaml", "model.mixer=[mamba2, attention]"),
        *("--nodes=2", "--address", "auto"),
    ]


def test_without_a_job_server_one_line_says_so():
    with pytest.raises(ValueError, match="no Ray job server answers: got .* at http://127.0.0.1:1"):
        jobs._client("http://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_detached_launch_is_asked_after_and_stopped(config_path, tmp_path):
    hosts = Hosts(("a",), cpus=2, dashboard=True)
    try:

        def launch(*arguments, check=True):
            process = hosts.launch(*arguments, "--address", hosts.address)
            output, _ = process.communicate(timeout=240)
            assert (process.returncode == 0) is check, output
            return output

        said = launch(config_path, "--detach", "training.total_steps=100000")
        job = re.match(r"(\S+) is submitted; it trains in ", said).group(1)
        deadline = time.monotonic() + 200
        while not re.search("step [4-9]|step [1-9][0-9]", shown := launch("status", job)):
            assert time.monotonic() < deadline, shown + launch("logs")
            time.sleep(1)
        assert f"{job}: running; {tmp_path}/run" in shown
        assert "training: 1 ranks on" in shown
        assert job in launch("list")
        assert "step 4/100000" in launch("logs", job)
        assert launch("stop").startswith(f"{job}: stopped")
        assert "error: stopped by SIGTERM after a checkpoint" in launch("logs")
        assert "no such launch: got none" in launch("status", "none", check=False)
    finally:
        hosts.close()
