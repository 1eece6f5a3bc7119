"""`python -m launch --module`: which command line of eval or data_prep it becomes. That it runs on
a cluster: test_ssh_cluster.py."""

import os
import sys
from typing import Any

import pytest

from launch import __main__ as command


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
            command.main()
        except Became as became:
            return became.args[0]
        except SystemExit as stop:
            return stop.code
        return None

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
        ((*EVAL, "--nodes", "none"), "Invalid value for '--nodes'"),
        (("--module",), "Option '--module' requires an argument"),
    ],
)
def test_mistakes_are_one_line(
    run: Any, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert run(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
