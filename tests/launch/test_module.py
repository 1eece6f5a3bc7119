"""`python -m launch --module`: which command line of eval or data_prep it becomes. That it runs on
a cluster: test_ssh_cluster.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_prep.command_line import run_command_line
from launch.module import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(*argv): what this process would have become, or the exit code."""

    class Became(Exception):
        pass

    def become(program: str, argv: list[str]) -> None:
        assert program == argv[0] == sys.executable
        raise Became(argv[1:])

    def run(*argv: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["launch", *argv])
        try:
            return run_command_line(app)
        except Became as became:
            return became.args[0]

    monkeypatch.setattr(os, "execv", become)
    return run


EVAL = ("--module", "eval", "runs/x", "--tasks", "niah")
PACK = ("--module", "data_prep", "pack", "corpus")
THERE = ("--address", "head:6379")


@pytest.mark.parametrize(
    ("argv", "becomes"),
    [
        ((*EVAL, *THERE), "eval runs/x --tasks niah --address head:6379"),
        (
            (*EVAL, *THERE, "--nodes", "2", "--gpus-per-node", "8"),
            "eval runs/x --tasks niah --address head:6379 --gpus 16",
        ),
        (
            ("--cpu-workers", "4", *EVAL, "--samples", "3", *THERE),
            "eval runs/x --tasks niah --samples 3 --address head:6379 --workers 4",
        ),
        ((*EVAL, "--gpus-per-node", "8"), "eval runs/x --tasks niah --gpus 8"),
        ((*PACK, "--seed", "3", *THERE), "data_prep pack corpus --seed 3 --address head:6379"),
        (
            (*PACK, "--nodes", "3", "--cpu-workers", "8", *THERE),
            "data_prep pack corpus --address head:6379 --workers 24",
        ),
        (PACK, "data_prep pack corpus"),
        (("--module", "eval", "--help"), "eval --help"),
    ],
)
def test_the_machines_asked_for_become_the_options_of_the_module(
    run: Any, argv: tuple[str, ...], becomes: str
) -> None:
    assert run(*argv) == ["-m", *becomes.split()]


def test_without_a_word_about_machines_eval_uses_all_of_this_one(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = "ray._private.accelerators.nvidia_gpu.NvidiaGPUAcceleratorManager"
    monkeypatch.setattr(f"{gpus}.get_current_node_num_accelerators", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert run(*EVAL)[-2:] == ["--workers", "6"]
    monkeypatch.setattr(f"{gpus}.get_current_node_num_accelerators", lambda: 4)
    assert run(*EVAL)[-2:] == ["--gpus", "4"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--module", "pretrain", "c.yaml"), "--module is unknown: got pretrain"),
        ((*EVAL, *THERE, "--nodes", "2"), "--nodes says nothing alone: got 2"),
        ((*EVAL, "--nodes", "2", "--cpu-workers", "1"), "one machine cannot be several nodes"),
        ((*PACK, "--gpus-per-node", "2"), "--gpus-per-node does not go with data_prep"),
        (
            (*EVAL, "--gpus-per-node", "2", "--cpu-workers", "1"),
            "--gpus-per-node does not go with --cpu-workers: got 2",
        ),
    ],
)
def test_what_means_nothing_is_refused(run: Any, argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        run(*argv)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--module", "pretrain", "c.yaml"), "--module is unknown: got pretrain; expected"),
        (("--module", "eval", "/nowhere", "--tasks", "niah", "--nodes", "x"), "Invalid value for"),
        (("--module", "eval", "/nowhere", "--tasks", "niah", "--cpu-workers", "1"), "no check"),
    ],
)
def test_the_launcher_says_so_in_one_line(argv: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")
