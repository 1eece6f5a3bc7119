import os
import subprocess

import pytest

from launch import binding


@pytest.mark.parametrize(
    ("near", "shared"),
    [
        ([[0, 1, 2, 3]] * 2, [[0, 1], [2, 3]]),
        ([[0, 1, 2]] * 2, [[0], [1, 2]]),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], [[0], [1], [2], [3]]),
        ([[0, 1]] * 3, [None, None, None]),
    ],
)
def test_processors_are_shared_among_the_ranks_near_them(near, shared):
    assert binding.shares(near) == shared


def test_the_kernels_list_is_read():
    assert binding.parse_cpu_list("0-2,8\n") == {0, 1, 2, 8}
    assert binding.parse_cpu_list("") == set()


def test_ranks_go_to_the_processors_of_their_gpus(monkeypatch, tmp_path):
    for bus, cpus in (("0000:1a:00.0", "0-1"), ("0000:9b:00.0", "2-3")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "local_cpulist").write_text(cpus)
    rows = "0, GPU-a, 00000000:1A:00.0\n1, GPU-b, 00000000:9B:00.0\n"
    monkeypatch.setattr(binding, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    done = subprocess.CompletedProcess([], 0, stdout=rows)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert binding.cpus_of_ranks(2) == [[2, 3], [0, 1]]


def test_without_gpus_all_processors_are_shared(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert binding.cpus_of_ranks(2) == [[0, 1], [2, 3]]
