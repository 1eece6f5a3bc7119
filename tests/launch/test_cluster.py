import ipaddress
import os
import subprocess
import sys

import pytest

from data_prep.ray_cluster import remove_stale_folders
from launch.cluster import HEAD_RESOURCE, Request, choose_nodes
from launch.nodes import names_of


def node(name, alive=True, head=False, **resources):
    if head:
        resources[HEAD_RESOURCE] = 1.0
    address = f"10.0.0.{name}"
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def request(nodes=1, gpus=0, workers=2):
    return Request(nodes=nodes, gpus_per_node=gpus, cpu_workers=workers)


def test_one_worker_per_gpu_else_cpu_workers():
    assert request(nodes=3, gpus=8).workers == 24
    assert request(nodes=3, gpus=0, workers=2).workers == 6


@pytest.mark.parametrize(
    ("asked", "nodes", "chosen"),
    [
        (request(gpus=8), [node("1", CPU=64)], None),
        (request(gpus=8), [node("1", CPU=64, GPU=8)], ["1"]),
        (request(nodes=2, gpus=8), [node("1", GPU=8), node("2", GPU=4)], None),
        (request(nodes=2, gpus=8), [node("1", GPU=8), node("2", False, GPU=8)], None),
        (request(nodes=2), [node("3", CPU=2), node("2", CPU=4)], ["2", "3"]),
        (request(nodes=2), [node("1", CPU=2), node("3", head=True, CPU=4)], ["3", "1"]),
        (request(nodes=2), [node("1", CPU=4)], None),
        (request(), [node("1", head=True), node("2", CPU=2)], ["2"]),
    ],
)
def test_nodes_that_hold_the_request_are_chosen_the_head_first(asked, nodes, chosen):
    def free():
        return {row["NodeID"]: row["Resources"] for row in nodes}

    if chosen is None:
        with pytest.raises(ValueError, match="the cluster is too small: got .* 10.0.0.1 has"):
            choose_nodes(asked, nodes, free)
    else:
        assert [row["NodeID"] for row in choose_nodes(asked, nodes, free)] == chosen


def test_nodes_in_use_are_passed_over_or_named(monkeypatch):
    monkeypatch.setattr("launch.cluster.IN_USE_SECONDS", 0.0)
    nodes = [node("1", CPU=2), node("2", CPU=2)]
    free = {"1": {"CPU": 1.0}, "2": {"CPU": 2.0}}
    assert choose_nodes(request(), nodes, lambda: free) == [nodes[1]]
    with pytest.raises(ValueError) as refused:
        choose_nodes(request(nodes=2), nodes, lambda: free)
    assert "the cluster is in use" in str(refused.value)
    assert "10.0.0.1 has 1, 10.0.0.2 has 2; expected 2 with at least 2" in str(refused.value)


def test_two_nodes_of_one_address_are_told_apart():
    rows = [node("1"), node("2"), {**node("3"), "NodeManagerAddress": "10.0.0.1"}]
    assert names_of(rows) == {"1": "10.0.0.1 (1)", "2": "10.0.0.2", "3": "10.0.0.1 (3)"}


LISTENERS = """
import subprocess
from launch.cluster import Request, cluster
with cluster(Request(nodes=1, gpus_per_node=0, cpu_workers=1), None):
    import os, psutil, ray
    ours = psutil.Process().children(recursive=True)
    addresses = {c.laddr.ip for p in ours for c in p.net_connections("tcp") if c.status == "LISTEN"}
    print(*addresses)
_, alive = psutil.wait_procs(ours, timeout=20)
print(alive, ray.is_initialized())
"""


@pytest.mark.slow
def test_private_cluster_listens_on_loopback_and_leaves_nothing():
    done = subprocess.run(
        [sys.executable, "-c", LISTENERS], capture_output=True, text=True, check=True, timeout=120
    )
    addresses, after = done.stdout.splitlines()
    assert "127.0.0.1" in addresses.split()
    for address in addresses.split():
        assert ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback, addresses
    assert after == "[] False"


def test_folders_of_dead_launches_are_removed_and_of_living_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.ray_cluster.FOLDER_PARENT", tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [f"fenwick-ray-{os.getpid()}-x", "fenwick-ray-notes-y", "other-1-z"]
    for name in [*kept, f"fenwick-ray-{dead.pid}-w"]:
        (tmp_path / name).mkdir()
    remove_stale_folders()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)
