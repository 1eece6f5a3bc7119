"""Tasks and checkpoints as Ray tasks, on CPU workers."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import eval.spread as spread
from eval.evaluation import Target, Unit
from eval.result import Options
from models.checkpoint_directory import step_folder, write_manifest

ROOT = Path(spread.__file__).parent.parent


def evaluate(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )


@pytest.mark.slow
def test_units_on_two_workers_give_what_one_process_gives(model_dir, source_folder, tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        folder = step_folder(run, step)
        shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("eval"))
        write_manifest(folder, {"step": step})
    options = ("--tasks", "perplexity,niah", "--text", source_folder / "this.txt")
    options += ("--lengths", "600", "--samples", "2", "--answer-tokens", "4", "--device", "cpu")
    done = evaluate(run, *options, "--all-checkpoints", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 units" in done.stderr
    spread_results = [
        json.loads((run / "eval" / f"step-0000000{step}" / "results.json").read_text())["results"]
        for step in (1, 2)
    ]
    assert evaluate(model_dir, *options, "--output", tmp_path / "here.json").returncode == 0
    here = json.loads((tmp_path / "here.json").read_text())["results"]

    def values(results):
        return {(r["task"], r["metric"]): r["value"] for r in results}

    assert values(spread_results[0]) == pytest.approx(values(here), rel=1e-6)
    assert values(spread_results[1]) == values(spread_results[0])


@pytest.mark.slow
def test_a_unit_whose_process_is_killed_runs_again(model_dir, source_folder, tmp_path):
    output = tmp_path / "results.json"
    argv = ["-m", "eval", model_dir, "--tasks", "perplexity", "--workers", "1", "--device", "cpu"]
    argv += ["--text", source_folder / "this.txt", "--output", output]
    process = subprocess.Popen(
        [sys.executable, *map(str, argv)], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    killed = None
    while killed is None and process.poll() is None:
        time.sleep(0.05)
        with contextlib.suppress(psutil.Error):  # what ends while we look
            for child in psutil.Process(process.pid).children(recursive=True):
                # It has the unit's name from before it imports torch.
                if "_run_there" in " ".join(child.cmdline()):
                    child.kill()
                    killed = child
                    break
    _, error = process.communicate(timeout=250)
    assert killed is not None, error
    assert process.returncode == 0, error
    assert json.loads(output.read_text())["results"]


def test_what_fails_in_a_worker_is_one_line(tmp_path):
    target = Target(
        model_dir=tmp_path / "gone",
        described={"weights_sha256": "aa", "tokenizer_sha256": None},
        output=tmp_path / "results.json",
        run=None,
    )
    unit = Unit(target=target, task="niah", options=Options(), device="cpu", beyond_trained=False)
    before = os.getcwd()
    results, problem = spread._run_there(unit, str(tmp_path))
    os.chdir(before)
    assert results == []
    assert problem is not None
    assert "gone is not a folder" in problem
    assert problem.endswith(f" (on {os.uname().nodename})")
    _, problem = spread._run_there(unit, str(tmp_path / "elsewhere"))
    assert problem is not None
    assert problem.startswith(f"cannot read {tmp_path / 'elsewhere'}: No such file")


@pytest.mark.parametrize("address", ["localhost:{free}", "nowhere"])
def test_address_where_nothing_answers_is_refused_at_once(address):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes it
        address = address.format(free=probe.getsockname()[1])
        with (
            pytest.raises(ValueError, match=f"got .*{address}.*; expected") as error,
            spread.connected(address, 0, 1),
        ):
            pass
    assert len(str(error.value).splitlines()) == 1


def test_gpus_and_workers_at_once_are_refused(model_dir):
    done = evaluate(model_dir, "--tasks", "niah", "--gpus", "1", "--workers", "1")
    assert done.returncode == 2
    assert "exclude each other: got 1 and 1" in done.stderr
    assert len(done.stderr.splitlines()) == 1
