"""When a worker group is started again, without Ray."""

from contextlib import nullcontext

import pytest

from launch import ray_train
from launch.cluster import Request
from launch.errors import LaunchFailed


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1), (138, 1), (142, 1), (143, 1)])
def test_only_a_failure_is_tried_again(tmp_path, monkeypatch, code, starts):
    begun = []

    def run_once(argv, request, storage, stop):
        begun.append(argv)
        return LaunchFailed("ended", code)

    monkeypatch.setattr(ray_train, "_run_once", run_once)
    monkeypatch.setattr(ray_train, "worker_lines_only", nullcontext)
    monkeypatch.setattr(ray_train, "cluster", lambda request, address: nullcontext(tmp_path))

    class Config:
        run_dir = tmp_path / "run"

    request = Request(nodes=1, gpus_per_node=0, cpu_workers=2)
    with pytest.raises(LaunchFailed) as failed:
        ray_train.train(
            Config(), ["CONFIG"], request, address=None, max_failures=2, stop_seconds=1.0
        )
    assert failed.value.code == code
    assert len(begun) == starts
