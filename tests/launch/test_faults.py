"""Two hosts of two ranks each: whatever happens to them, the run goes on as if nothing had."""

import json
import subprocess
import sys
import threading
import time

import pytest
import yaml

from tests.launch.hosts import Hosts

# On one processor with other work beside it, a start of four ranks takes up to a minute.
PATIENCE_SECONDS = 240


@pytest.fixture
def hosts():
    hosts = Hosts(("a", "b"), cpus=2)
    yield hosts
    hosts.close()


class Watched:
    """A launch whose output is kept, and its run's log."""

    def __init__(self, process, run_dir):
        self.process, self.run_dir, self.lines = process, run_dir, []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))

    def log(self):
        steps = []
        try:
            text = (self.run_dir / "log.jsonl").read_text()
        except OSError:
            return []
        for line in text.splitlines():
            try:
                steps.append(json.loads(line))
            except ValueError:
                continue  # half a line
        return [step for step in steps if "loss" in step]

    def record(self):
        return json.loads((self.run_dir / "logs" / "launch.json").read_text())

    def step(self):
        return max((step["step"] for step in self.log()), default=0)

    def until(self, condition, what):
        """Returns when it holds; fails where the launch ends or it takes far too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{what}: exit code {self.process.poll()}\n" + "\n".join(self.lines))
            time.sleep(0.1)

    def says(self, text, after=0):
        return any(text in line for line in self.lines[after:])

    def end(self, timeout=PATIENCE_SECONDS):
        self.process.wait(timeout)
        self._reader.join(30)
        return "\n".join(self.lines)


@pytest.fixture
def launch(hosts):
    started = []

    def start(run_dir, *arguments):
        hosts_and_ranks = ["--nodes", "2", "--cpu-workers", "2", "--address", hosts.address]
        process = hosts.launch(*arguments, *hosts_and_ranks, f"run_dir={run_dir}")
        started.append(Watched(process, run_dir))
        return started[-1]

    yield start
    for watched in started:
        if watched.process.poll() is None:
            watched.process.terminate()
            watched.end(60)


@pytest.fixture
def config(config_path):
    """Updates of about a second on four ranks, so that a fault meets one."""
    tree = yaml.safe_load(config_path.read_text())
    tree["batch"] = {"batch_tokens": 16384, "micro_batch_rows": 2}
    tree["training"]["total_steps"] = 100_000  # it is stopped when all faults are over
    tree["checkpoint"] = {"every_steps": 3}
    config_path.write_text(yaml.safe_dump(tree))
    return config_path


def compare_with_unbroken(config, run_dir, last):
    """Trains the same in one process, as far, and holds the two against each other."""
    unbroken = run_dir.with_name("unbroken")
    with open(unbroken.with_suffix(".txt"), "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pretrain", config, f"run_dir={unbroken}"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    alone = Watched(process, unbroken)
    alone.until(lambda: alone.step() >= last, "the unbroken run")
    process.terminate()
    assert process.wait(120) == 143
    compare = [sys.executable, "-m", "pretrain", "compare", run_dir, unbroken]
    done = subprocess.run(
        [*compare, "--tolerance", "1e-5"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"{last} steps in both" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_goes_on_through_every_fault(hosts, launch, config, tmp_path):
    options = ["--min-nodes", "1", "--max-failures", "9"]
    run = launch(tmp_path / "run", config, *options)
    run.until((run.run_dir / "checkpoints" / "latest").exists, "first checkpoint")

    def fault(strike, announced):
        """Waits until the run has lost and regained its place."""
        seen, starts = len(run.lines), len(run.record()["starts"])
        strike()
        run.until(lambda: run.says(announced, seen), announced)
        run.until(lambda: len(run.record()["starts"]) > starts, f"a start after {announced}")
        begun = run.record()["starts"][starts]["time"]
        run.until(lambda: run.log()[-1]["time"] > begun, f"an update after {announced}")

    fault(lambda: max(hosts.ranks("b").items())[1].kill(), "was killed by SIGKILL")
    fault(lambda: hosts.kill("b"), "restart 2 of 9")
    fault(lambda: hosts.join("b"), "growing from 1 to 2 nodes")
    if hosts.separate:
        fault(lambda: hosts.cut("b"), "restart 3 of 9")
        fault(lambda: hosts.mend("b"), "growing from 1 to 2 nodes")
    ranks = [*hosts.ranks("a").values(), *hosts.ranks("b").values()]
    assert len(ranks) == 4
    run.process.terminate()
    output = run.end()
    assert run.process.returncode == 143, output
    assert output.splitlines()[-1].startswith("error: stopped by SIGTERM after a checkpoint")
    assert "all-reduce over gloo between 2 nodes: 16 MiB in" in output
    assert not any(rank.is_running() for rank in ranks)
    last = run.step()
    assert [step["step"] for step in run.log()] == list(range(1, last + 1))
    compare_with_unbroken(config, run.run_dir, last)
    record = run.record()
    assert record["state"] == "stopped"
    assert len(record["failures"]) == (4 if hosts.separate else 3)  # and the stop
    assert [start["ranks"] for start in record["starts"][:4]] == [4, 4, 2, 4]
    for rank in range(4):
        log = (run.run_dir / "logs" / f"rank-{rank:05d}.log").read_text()
        assert log.count("--- ") >= 3
