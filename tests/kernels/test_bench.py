"""python -m kernels: what it measures, writes and refuses, on a CPU at toy sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.bench_cases import Sizes

ROOT = Path(__file__).parents[2]
SMALL = ["--heads", "2", "--key-size", "16", "--value-size", "16", "--batch-tokens", "128"]


def kernels(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kernels", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("op", ["ssd", "gated_delta"])
def test_bench_writes_what_it_prints_and_a_plot(op, tmp_path):
    options = ["--op", op, "--device", "cpu", "--dtype", "float32", "--lengths", "64,128"]
    # fla needs a GPU: named, and the others go on
    peers = ["--against", "fenwick_packed,fenwick_odd,sdpa,fla"]
    ran = kernels("bench", *options, *peers, *SMALL, "--output", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / f"{op}.json").read_text())
    found = [(m["operator"], m["B"], m["T"]) for m in result["measurements"]]
    operators = ["fenwick", "fenwick_packed", "fenwick_odd", "sdpa"]
    assert found == [(name, B, T) for name in operators for B, T in [(2, 64), (1, 128)]]
    assert all(0 < m["forward_ms"] < m["both_ms"] for m in result["measurements"])
    assert list(result["failures"]) == ["fla"]
    assert "fla did not finish" in ran.stdout
    assert (tmp_path / f"{op}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "scan"], "unknown operator: got scan; expected ssd or gated_delta"),
        (["--against", "them"], "unknown peer: got ['them']"),
        (["--lengths", "64,x"], "no length: got '64,x'"),
        (["--heads", "3", "--groups", "2"], "heads do not divide: got 3 in 2 groups"),
        (["--dtype", "int8"], "unknown dtype: got int8"),
        (["--groups", "0"], "--groups is too small: got 0; expected at least 1"),
        (["--batch-tokens", "-5"], "--batch-tokens is too small: got -5"),
        (["--output", "README.md"], "--output is a file: got README.md"),
    ],
)
def test_bench_refuses_in_one_line(arguments, message):
    ran = kernels("bench", "--device", "cpu", *arguments)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert message in ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "bench-step", "tune"])
def test_without_a_gpu_it_says_so(command):
    ran = kernels(command)
    assert ran.returncode == 2
    assert "no CUDA device here" in ran.stderr


def test_flops_of_one_chunk_are_those_of_its_products():
    B, T, H, K, V = 2, 128, 3, 16, 32
    sizes = Sizes(B, T, 1, H, K, V, torch.float32, torch.device("cpu"))
    forward, _ = sizes.flops
    scores, inside, state = 2 * T * T * K, H * 2 * T * T * V, H * 2 * T * K * V
    assert forward == B * (scores + inside + state)  # a single chunk reads no node
