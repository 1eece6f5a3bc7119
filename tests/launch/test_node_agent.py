"""A node's agent without Ray: it is an ordinary object."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from data_prep.ray_cluster import ROOT
from launch.node_agent import NodeAgent, Order


@pytest.fixture
def agent():
    agent = NodeAgent("127.0.0.1", 0, lease_seconds=1e6)
    yield agent
    assert agent.kill()


@pytest.fixture
def order(tmp_path):
    """order(rank, source): a rank that runs this source."""

    def make(rank, source, **changes):
        (tmp_path / f"rank_{rank}.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        environment = {"PYTHONPATH": path, "RANK": str(rank)}
        settings = {"log": str(tmp_path / "logs" / f"{rank}.log"), "title": "--- begins"}
        return Order(
            rank=rank,
            module=f"rank_{rank}",
            arguments=("one", "two words"),
            environment=environment,
            working_directory=str(tmp_path),
            **{**settings, **changes},
        )

    return make


def wait_for(agent, done):
    """All news until `done(lines, ended)`."""
    lines, ended = [], []
    deadline = time.monotonic() + 120
    while not done(lines, ended) and time.monotonic() < deadline:
        news = agent.news(0.2)
        lines += news.lines
        ended += news.ended
    assert done(lines, ended), (lines, ended)
    return lines, ended


SPEAK = """
import os, sys
print(os.environ["RANK"], sys.argv[1:], os.getcwd(), flush=True)
print("to stderr", file=sys.stderr)
if os.environ["RANK"] == "1":
    print("error: no disk", file=sys.stderr)
    sys.exit(3)
"""


def test_lines_ends_and_logs_of_every_rank(agent, order, tmp_path):
    agent.start([order(rank, SPEAK) for rank in (0, 1)], bind=False)
    lines, ended = wait_for(agent, lambda lines, ended: len(ended) == 2)
    arguments = ["one", "two words"]
    for rank in (0, 1):
        mine = [line for number, line in lines if number == rank]
        assert mine == [f"{rank} {arguments} {tmp_path}", "to stderr"]
        log = (tmp_path / "logs" / f"{rank}.log").read_text().splitlines()
        assert log[:3] == ["--- begins", *mine]
    assert {(end.rank, end.code, end.message) for end in ended} == {(0, 0, ""), (1, 3, "no disk")}


SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(1000)"


def test_killed_ranks_are_no_news_of_the_next_ones(agent, order):
    for _ in range(3):
        agent.start([order(rank, SLEEP) for rank in (0, 1)], bind=False)
        lines, ended = wait_for(agent, lambda lines, ended: len(lines) == 2)
        assert not ended
        assert agent.kill()
        assert agent.news(0.0).ended == []


def test_a_signal_reaches_ranks_whatever_this_process_does_with_it(agent, order):
    source = f"import signal\nsignal.signal(signal.SIGINT, lambda *_: exit(130))\n{SLEEP}"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as in Ray's workers
    try:
        agent.start([order(0, source)], bind=False)
        wait_for(agent, lambda lines, ended: lines)
        agent.send(signal.SIGINT)
        _, ended = wait_for(agent, lambda lines, ended: ended)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert ended[0].code == 130


def test_a_rank_that_cannot_start_ends(agent, order, tmp_path):
    agent.start([order(0, SPEAK, log=str(tmp_path / "rank_0.py" / "log"))], bind=False)
    _, ended = wait_for(agent, lambda lines, ended: ended)
    assert ended[0].message.startswith("cannot start: ")


def test_what_a_rank_leaves_behind_ends_with_it(agent, order):
    source = "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)"
    agent.start([order(0, source)], bind=False)
    lines, _ = wait_for(agent, lambda lines, ended: ended)
    left = int(lines[0][1])
    for _ in range(200):
        if not psutil.pid_exists(left) or psutil.Process(left).status() == "zombie":
            break
        time.sleep(0.1)
    else:
        pytest.fail("it lives")


# An agent in a process of its own, which prints the id of its rank's process.
HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from launch.node_agent import NodeAgent, Order
agent = NodeAgent("127.0.0.1", 0, float(sys.argv[3]))
order = Order(rank=0, module="rank_0", arguments=(), working_directory=sys.argv[2], log=None,
              environment={"PYTHONPATH": sys.argv[2] + ":" + sys.argv[1]})
agent.start([order], bind=False)
while not (lines := agent.news(1.0).lines):
    pass
print(lines[0][1], flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["killed", "lease"])
def test_ranks_end_with_the_agent_and_with_its_lease(tmp_path, how):
    (tmp_path / "rank_0.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)"
    )
    lease = "1e6" if how == "killed" else "5"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(ROOT), str(tmp_path), lease],
        stdout=subprocess.PIPE,
        text=True,
    )
    rank = psutil.Process(int(holder.stdout.readline()))
    if how == "killed":
        holder.kill()
    assert holder.wait(60) == (-9 if how == "killed" else 1)
    _, alive = psutil.wait_procs([rank], timeout=60)
    assert not alive


def test_the_environment_that_is_shown_is_the_one_ranks_get(agent, order, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    source = "import os\nfor item in os.environ.items(): print('='.join(item))"
    given = {"OMP_NUM_THREADS": "7"}
    bindings, shown = agent.describe(1, False, given)
    one = order(0, source)
    one.environment.update(given)
    agent.start([one], bind=False)
    lines, _ = wait_for(agent, lambda lines, ended: ended)
    got = dict(line.split("=", 1) for _, line in lines if "=" in line)
    assert bindings == ["any"]
    assert shown["OMP_NUM_THREADS"] == "7"
    assert shown["CUDA_VISIBLE_DEVICES"] == ""
    assert shown.items() <= got.items()
    assert not [name for name in got if name.startswith("RAY_")]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be shared out")
def test_bound_ranks_keep_to_processors_of_their_own(agent, order):
    source = "import os\nprint(','.join(map(str, sorted(os.sched_getaffinity(0)))))"
    agent.start([order(rank, source) for rank in (0, 1)], bind=True)
    lines, _ = wait_for(agent, lambda lines, ended: len(ended) == 2)
    bindings, _ = agent.describe(2, True, {})
    assert sorted(lines) == list(enumerate(bindings))
    assert not set(bindings[0].split(",")) & set(bindings[1].split(","))
