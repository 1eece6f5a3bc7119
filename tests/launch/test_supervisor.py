"""When ranks are started again, and on which nodes: nodes and ranks are made up here."""

import json
import signal

import pytest

from launch import supervisor as supervisor_module
from launch.cluster import Request
from launch.errors import LaunchFailed, NodeRefused
from launch.node_agent import Ended, News
from launch.nodes import Node
from launch.plan import Plan
from launch.record import Record, read_record
from launch.stop import StopRequest
from launch.supervisor import Limits, Supervisor, last_step
from pretrain.config import load_config


class FakeNodes:
    """Each start plays the next scene: a function that is asked for news again and again."""

    def __init__(self, names, scenes):
        self.healthy = [Node(name, name, name, None) for name in names]
        self.away = []
        self.scenes = iter(scenes)
        self.starts = []
        self.signals = []

    def call(self, node, method, *arguments):
        assert method == "free_port"
        return 4000

    def start(self, orders, bind):
        self.starts.append([node.name for node in orders])
        self.ranks = [order.rank for each in orders.values() for order in each]
        self.asked = 0
        self.scene = next(self.scenes)

    def news(self, seconds):
        self.asked += 1
        return self.scene(self)

    def lose(self, name):
        node = next(node for node in self.healthy if node.name == name)
        self.healthy.remove(node)
        self.away.append(node)
        return node

    def look(self):
        """Nodes come back at the third look."""
        self.looks = getattr(self, "looks", 0) + 1
        if self.looks >= 3:
            self.healthy += self.away
            self.away = []

    def send(self, number):
        self.signals.append(number)

    def kill_ranks(self, seconds):
        return []


def all_end(*codes, message=""):
    """A scene: the ranks end with these codes, the last for all others."""

    def scene(nodes):
        padded = [*codes, *[codes[-1]] * len(nodes.ranks)]
        said = [message if code else "" for code in padded]
        ends = [Ended(rank, padded[rank], said[rank]) for rank in nodes.ranks]
        return [News(ended=ends)], []

    return scene


complete = all_end(0)


def node_goes(name):
    def scene(nodes):
        return ([], [nodes.lose(name)]) if nodes.asked == 1 else ([], [])

    return scene


@pytest.fixture
def launch(config_path, tmp_path, monkeypatch):
    """launch(names, scenes, ...): plays them; returns (nodes, lines told, pauses)."""
    config = load_config(config_path)
    pauses, told = [], []
    monkeypatch.setattr(supervisor_module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "UNCLEAR_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "FULL_SET_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "FENCE_SECONDS", 0.0, raising=False)
    monkeypatch.setattr(Supervisor, "_wait", lambda self, seconds: pauses.append(seconds))
    monkeypatch.setattr(supervisor_module, "fence", lambda lost, wait: None)
    stop = StopRequest(0.0)

    def play(names, scenes, *, max_failures=3, min_nodes=None, wait_seconds=60.0):
        nodes = FakeNodes(names, scenes)
        request = Request(nodes=len(names), gpus_per_node=0, cpu_workers=1)
        plan = Plan(config, ["CONFIG"], request, bind=False, port=None)
        least = len(names) if min_nodes is None else min_nodes
        limits = Limits(max_failures=max_failures, min_nodes=least, wait_seconds=wait_seconds)
        record = Record(plan.run_dir)
        try:
            Supervisor(plan, nodes, limits, stop, record, told.append).run()
        finally:
            play.record = read_record(plan.run_dir)
        return nodes, told, pauses

    play.told, play.pauses, play.stop, play.run_dir = told, pauses, stop, tmp_path / "run"
    yield play
    stop.restore()


def log_step(run_dir, step):
    run_dir.mkdir(exist_ok=True)
    with open(run_dir / "log.jsonl", "a") as file:
        file.write("\n" + json.dumps({"step": step, "loss": 1.0}) + '\n{"half a li')


def test_a_run_without_a_fault_starts_once(launch):
    nodes, told, _ = launch(["a", "b"], [complete])
    assert nodes.starts == [["a", "b"]]
    assert not told
    assert launch.record["state"] == "complete"
    assert launch.record["starts"][0]["ranks"] == 2


def test_lines_have_the_prefix_of_their_rank(launch):
    def speaks(nodes):
        if nodes.asked == 1:
            return [News(lines=[(1, "hello"), (0, "step 1")])], []
        return complete(nodes)

    assert launch(["a", "b"], [speaks])[1] == ["rank 1: hello", "rank 0: step 1"]
    launch.told.clear()
    assert launch(["a"], [speaks])[1] == ["hello", "step 1"]  # one rank needs none


def test_a_killed_rank_is_started_again_and_counted(launch):
    nodes, told, _ = launch(["a", "b"], [all_end(-9, 1), all_end(1, -9), complete])
    assert nodes.starts == [["a", "b"]] * 3
    assert "rank 0 on node a was killed by SIGKILL" in told[0]
    assert "restart 1 of 3 from the beginning in 2 s" in told[0]
    assert "restart 2 of 3" in told[1]
    assert [f["step"] for f in launch.record["failures"]] == [0, 0]


def test_pauses_grow_until_there_is_progress(launch, monkeypatch):
    checkpoints = iter([None, None, None, "step-1", "step-1", "step-1"])
    monkeypatch.setattr(Supervisor, "_checkpoint", lambda self: next(checkpoints))
    scenes = [all_end(-9)] * 5 + [complete]
    _, told, pauses = launch(["a"], scenes, max_failures=5)
    assert pauses == [2.0, 4.0, 1.0, 2.0, 4.0]
    assert "from step-1 in 1 s" in told[2]


def test_restarts_end_with_max_failures(launch):
    with pytest.raises(LaunchFailed, match="was killed by SIGKILL") as failed:
        launch(["a"], [all_end(-9)] * 3, max_failures=2)
    assert failed.value.code == 1
    assert launch.record["state"] == "failed"


@pytest.mark.parametrize("code", [2, 138, 142, 143])
def test_a_refusal_and_a_wanted_end_are_final(launch, code):
    with pytest.raises(LaunchFailed) as failed:
        launch(["a", "b"], [all_end(code, message="why" if code == 2 else "")])
    assert failed.value.code == code


def test_a_refusal_after_a_fault_may_pass(launch):
    refused = all_end(2, message="run_dir is in use")
    nodes, _, _ = launch(["a"], [all_end(-9), refused, complete])
    assert len(nodes.starts) == 3


def test_the_same_error_at_the_same_step_twice_is_the_end(launch):
    log_step(launch.run_dir, 7)
    with pytest.raises(LaunchFailed, match="KeyError\nthe same error came twice at step 7"):
        launch(["a"], [all_end(1, message="KeyError")] * 2, max_failures=9)


def test_the_same_error_at_another_step_is_not(launch):
    def fails(nodes):
        log_step(launch.run_dir, 7 + len(nodes.starts))
        return all_end(1, message="KeyError")(nodes)

    nodes, _, _ = launch(["a"], [fails, fails, complete])
    assert len(nodes.starts) == 3


def test_a_lost_node_is_waited_for(launch):
    nodes, told, _ = launch(["a", "b"], [node_goes("b"), complete])
    assert nodes.starts == [["a", "b"], ["a", "b"]]
    assert "node b is lost" in told[0]


def test_a_node_that_stays_away_ends_the_launch(launch, monkeypatch):
    monkeypatch.setattr(FakeNodes, "look", lambda self: None)
    with pytest.raises(LaunchFailed, match="too few nodes are left: got 1 for .* expected 2"):
        launch(["a", "b"], [node_goes("b")], wait_seconds=0.0)


def test_with_min_nodes_it_goes_on_and_grows_after_a_checkpoint(launch, monkeypatch):
    checkpoint = ["step-1"]
    monkeypatch.setattr(Supervisor, "_checkpoint", lambda self: checkpoint[0])

    def trains(nodes):
        if nodes.asked == 20:
            assert len(nodes.healthy) == 2, "it has not looked for the node"
            checkpoint[0] = "step-2"
        assert nodes.asked < 22
        return [], []

    nodes, told, _ = launch(["a", "b"], [node_goes("b"), trains, complete], min_nodes=1)
    assert nodes.starts == [["a", "b"], ["a"], ["a", "b"]]
    assert told[1:] == ["2 nodes after the next checkpoint", "growing from 1 to 2 nodes"]
    assert len(launch.record["failures"]) == 1


def test_only_as_many_nodes_as_the_batch_divides_over(launch):
    # 4 rows, 2 a micro-batch: one or two ranks.
    nodes, _, _ = launch(["a", "b", "c"], [complete], min_nodes=1)
    assert nodes.starts == [["a", "b"]]


def test_a_node_that_fails_while_starting_is_a_fault(launch, monkeypatch):
    calls = []

    def call(self, node, method, *arguments):
        calls.append(method)
        if len(calls) == 1:
            raise NodeRefused(node.name, "does not answer any more")
        return 4000

    monkeypatch.setattr(FakeNodes, "call", call)
    nodes, told, _ = launch(["a"], [complete])
    assert "node a: does not answer any more; restart 1 of 3" in told[0]
    assert nodes.starts == [["a"]]


def test_a_signal_goes_to_the_ranks_which_save(launch, monkeypatch):
    monkeypatch.setattr(Supervisor, "_checkpoint", lambda self: "step-3")
    launch.stop.seconds = 60.0

    def stopped(nodes):
        if nodes.asked == 1:
            signal.raise_signal(signal.SIGUSR1)
            return [], []
        assert nodes.signals == [signal.SIGUSR1]
        return all_end(138)(nodes)

    with pytest.raises(LaunchFailed, match="stopped by SIGUSR1 after a checkpoint") as failed:
        launch(["a", "b"], [stopped])
    assert failed.value.code == 138
    assert launch.record["state"] == "stopped"


def test_ranks_that_do_not_save_in_time_are_ended(launch):
    def deaf(nodes):
        if nodes.asked == 1:
            signal.raise_signal(signal.SIGTERM)
        return [], []

    with pytest.raises(LaunchFailed, match="before its ranks had saved a checkpoint") as failed:
        launch(["a"], [deaf])
    assert failed.value.code == 143


def test_a_signal_between_two_starts_ends_at_once(launch, monkeypatch):
    monkeypatch.setattr(Supervisor, "_wait", lambda self, s: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        launch(["a"], [all_end(-9)])


def test_last_step_reads_over_half_a_line(tmp_path):
    assert last_step(tmp_path) == 0
    log_step(tmp_path, 12)
    assert last_step(tmp_path) == 12
