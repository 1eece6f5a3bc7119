"""What is refused before anything starts: the nodes are made up here."""

import json
import os
import socket
from pathlib import Path

import pytest

from launch import preflight as preflight_module
from launch.addresses import free_port, interface_of, reaches
from launch.cluster import Request
from launch.environment import node_variables, passed_on
from launch.errors import NodeRefused
from launch.node_agent import Ended, News
from launch.nodes import Node
from launch.preflight import Preflight
from launch.probe import probe
from pretrain.config import load_config

ROWS = [{"NodeID": "1" * 56, "NodeManagerAddress": "10.0.0.1"}]
ROWS += [{"NodeID": "2" * 56, "NodeManagerAddress": "10.0.0.2"}]


@pytest.fixture
def check(config_path, monkeypatch):
    """check(*changes): asks as many nodes as there are functions; each changes an answer."""
    config = load_config(config_path)
    told = []

    def run(*changes):
        def ask_all(ids, names, question):
            answers = [probe(question) for _ in ids]
            for answer, change in zip(answers, changes, strict=True):
                change(answer)
            return answers

        monkeypatch.setattr(preflight_module, "_ask_all", ask_all)
        request = Request(nodes=len(changes), gpus_per_node=0, cpu_workers=1)
        Preflight(config, request, told.append).check_nodes(ROWS[: len(changes)])
        return told

    run.run_dir = config.run_dir
    run.dataset = config.data.dataset
    return run


def fine(answer):
    pass


def test_equal_nodes_are_accepted_and_nothing_is_left_behind(check):
    told = check(fine, fine)
    assert told[0].startswith("2 nodes: Python 3.")
    assert "torch 2." in told[0]
    assert [p.name for p in check.run_dir.rglob("*")] == ["logs"]


def changed(**settings):
    return lambda answer: answer.update(settings)


def other_torch(answer):
    answer["versions"]["torch"] = "1.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_torch, "another version of torch: got 1.0; expected 2"),
        (changed(python="3.9.1"), "another version of Python: got 3.9.1"),
        (changed(missing=["deepspeed"]), "module is missing: got no deepspeed"),
        (changed(repository=False), "repository is not there"),
        (changed(working_directory=False), "working directory is not there"),
        (changed(unseen=["token"]), "run folder is not shared"),
        (changed(answer="/nowhere"), "run folder is not shared: got no sight here"),
        (changed(answer_error="Read-only file system"), "run folder cannot be written: got Read"),
        (changed(free_bytes=1000), "disk is too full: got 1,000 bytes free in"),
        (changed(temporary_free_bytes=1), "disk is too full: got 1 bytes free in its folder"),
    ],
)
def test_what_a_node_lacks_is_one_line_that_names_it(check, change, message):
    with pytest.raises(NodeRefused) as refused:
        check(fine, change)
    assert str(refused.value).startswith("node 10.0.0.2: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_data_sets_are_there_and_the_same(check):
    def without(answer):
        answer["manifests"] = dict.fromkeys(answer["manifests"])

    def other(answer):
        answer["manifests"] = dict.fromkeys(answer["manifests"], "0" * 64)

    with pytest.raises(NodeRefused, match="node 10.0.0.1: data set is not there: got no .*manifes"):
        check(without, fine)
    with pytest.raises(NodeRefused, match="node 10.0.0.2: has another data set: got a different"):
        check(fine, other)


def test_a_probe_sees_what_is_there_and_what_is_not(tmp_path):
    (tmp_path / "token").write_text("right")
    question = {
        "root": str(tmp_path),
        "libraries": ("pytest", "no-such-library"),
        "modules": ("json", "no_such_module"),
        "working_directory": str(tmp_path / "none"),
        "tokens": {str(tmp_path / "token"): "wrong", str(tmp_path / "none"): "right"},
        "answers": str(tmp_path / "none"),
        "manifests": [str(tmp_path / "token"), str(tmp_path / "none")],
        "disk": str(tmp_path / "not" / "yet"),
    }
    facts = probe(question)
    assert facts["versions"] == {"pytest": pytest.__version__, "no-such-library": None}
    assert facts["missing"] == ["no_such_module"]
    assert not facts["repository"]
    assert not facts["working_directory"]
    assert facts["unseen"] == list(question["tokens"])
    assert facts["answer_error"] == "No such file or directory"
    assert list(map(bool, facts["manifests"].values())) == [True, False]
    assert facts["free_bytes"] > 0
    question |= {"tokens": {str(tmp_path / "token"): "right"}, "answers": str(tmp_path)}
    facts = probe(question)
    assert facts["unseen"] == []
    assert Path(facts["answer"]).parent == tmp_path


class Connected:
    """Two nodes whose agents answer as the test wants."""

    def __init__(self, answers, news=()):
        self.healthy = [Node(name, f"10.0.0.{name}", name, None) for name in ("1", "2")]
        self.answers = answers
        self.to_come = list(news)
        self.killed = False

    def call(self, node, method, *arguments):
        return self.answers[method]

    def start(self, orders, bind):
        self.environments = [order.environment for each in orders.values() for order in each]

    def news(self, seconds):
        return [self.to_come.pop(0)] if self.to_come else [], []

    def kill_ranks(self):
        self.killed = True


@pytest.fixture
def network(config_path):
    """network(nodes, port, gpus): checks the network between these nodes."""
    told = []
    config = load_config(config_path)

    def run(nodes, port=None, gpus=0):
        request = Request(nodes=len(nodes.healthy), gpus_per_node=gpus, cpu_workers=1)
        Preflight(config, request, told.append).check_network(nodes, port)
        return told

    return run


REACHABLE = {"free_port": 4000, "reaches": "Connection refused"}


def test_the_measured_bandwidth_is_printed(network):
    result = json.dumps({"seconds": 0.02, "bytes_per_second": 1.5e9})
    news = News(lines=[(0, "a warning"), (0, result)], ended=[Ended(0, 0, ""), Ended(1, 0, "")])
    nodes = Connected(REACHABLE, [news])
    assert network(nodes) == ["all-reduce over gloo between 2 nodes: 16 MiB in 20.0 ms, 1.50 GB/s"]
    assert nodes.killed
    assert [e["MASTER_ADDR"] for e in nodes.environments] == ["10.0.0.1"] * 2
    assert [e["RANK"] for e in nodes.environments] == ["0", "1"]


def test_with_gpus_all_of_them_take_part_also_on_one_node(network):
    result = json.dumps({"seconds": 0.001, "bytes_per_second": 2.68e11})
    news = News(lines=[(0, result)], ended=[Ended(0, 0, ""), Ended(1, 0, "")])
    nodes = Connected(REACHABLE, [news])
    nodes.healthy = nodes.healthy[:1]
    line = "all-reduce over nccl between 2 GPUs of 1 node: 256 MiB in 1.0 ms, 268.00 GB/s"
    assert network(nodes, gpus=2) == [line]
    assert [e["LOCAL_RANK"] for e in nodes.environments] == ["0", "1"]
    assert [e["WORLD_SIZE"] for e in nodes.environments] == ["2", "2"]


def test_a_taken_port_and_a_cut_way_name_the_node(network):
    with pytest.raises(NodeRefused, match="node 1: port is taken: got --port 29500; expected"):
        network(Connected({"free_port": 0}), 29500)
    unreachable = Connected({"free_port": 4000, "reaches": "No route to host"})
    with pytest.raises(NodeRefused, match="node 2: does not reach node 1: got No route to host at"):
        network(unreachable)


def test_a_failed_all_reduce_names_the_node(network, monkeypatch):
    nodes = Connected(REACHABLE, [News(ended=[Ended(1, 1, "connect timed out")])])
    with pytest.raises(NodeRefused, match="node 2: all-reduce .* failed: connect timed out"):
        network(nodes)
    assert nodes.killed
    monkeypatch.setattr(preflight_module, "ALL_REDUCE_SECONDS", 0.0)
    with pytest.raises(NodeRefused, match="node 2: all-reduce .* is not over after 0 s"):
        network(Connected(REACHABLE))


def test_ports_and_ways_of_this_machine():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) == 0
        assert reaches("127.0.0.1", port, 5.0) is None
    assert "refused" in str(reaches("127.0.0.1", port, 5.0)).lower()
    assert free_port(None) > 0


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # of the documents' network: nobody's


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/node/cache")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")  # Ray sets it for its own workers
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    found = node_variables("127.0.0.1", 2, 0, {"GLOO_SOCKET_IFNAME": "ib0"})
    assert found == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "TRITON_CACHE_DIR": "/node/cache",
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "",
    }
    gpus = node_variables("127.0.0.1", 2, 2, {"OMP_NUM_THREADS": "3"})
    assert gpus["OMP_NUM_THREADS"] == "3"
    assert gpus["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in gpus
    assert "NCCL_SOCKET_IFNAME" not in gpus  # loopback is no network


def test_only_settings_of_libraries_are_passed_on():
    given = {"NCCL_DEBUG": "INFO", "HOME": "/root", "RAY_ADDRESS": "x", "OMP_NUM_THREADS": "2"}
    assert passed_on(given) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
