import ipaddress
import os
import subprocess
import sys

import pytest

from data_prep.ray_cluster import remove_stale_folders
from launch.cluster import Request, check_resources, worker_environment


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": resources}


def request(nodes=1, gpus=0, workers=2):
    return Request(nodes=nodes, gpus_per_node=gpus, cpu_workers=workers)


def test_one_worker_per_gpu_else_cpu_workers():
    assert request(nodes=3, gpus=8).workers == 24
    assert request(nodes=3, gpus=0, workers=2).workers == 6


@pytest.mark.parametrize(
    ("asked", "nodes", "fits"),
    [
        (request(gpus=8), [node(CPU=64)], False),
        (request(gpus=8), [node(CPU=64, GPU=8)], True),
        (request(nodes=2, gpus=8), [node(GPU=8), node(GPU=4)], False),
        (request(nodes=2, gpus=8), [node(GPU=8), node(False, GPU=8)], False),
        (request(nodes=2, workers=2), [node(CPU=2), node(CPU=4)], True),
        (request(nodes=2, workers=2), [node(CPU=4)], False),
    ],
)
def test_cluster_must_hold_the_request(asked, nodes, fits):
    if fits:
        check_resources(asked, nodes)
    else:
        with pytest.raises(ValueError, match="the cluster is too small"):
            check_resources(asked, nodes)


def test_cpu_workers_see_no_gpu_and_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    env = worker_environment(request(workers=2), private=False)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(request(gpus=1), private=False)


LISTENERS = """
import subprocess
from launch.cluster import Request, cluster
with cluster(Request(nodes=1, gpus_per_node=0, cpu_workers=1), None) as folder:
    import os, psutil, ray
    ours = psutil.Process().children(recursive=True)
    addresses = {c.laddr.ip for p in ours for c in p.net_connections("tcp") if c.status == "LISTEN"}
    print(*addresses)
_, alive = psutil.wait_procs(ours, timeout=20)
print(alive, folder.exists(), ray.is_initialized())
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
    assert after == "[] False False"


def test_folders_of_dead_launches_are_removed_and_of_living_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.ray_cluster.FOLDER_PARENT", tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [f"fenwick-ray-{os.getpid()}-x", "fenwick-ray-notes-y", "other-1-z"]
    for name in [*kept, f"fenwick-ray-{dead.pid}-w"]:
        (tmp_path / name).mkdir()
    remove_stale_folders()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)
