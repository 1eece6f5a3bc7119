"""Sweeps of training runs: what they run, what they leave, how they stop and go on."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from pretrain.sweep_file import read
from pretrain.training_sweep import TrainingSweep

ROOT = Path(__file__).parents[2]
ARMS = [
    {"name": "linear", "settings": {"model.level_weights.kind": "linear"}},
    {"name": "adaptive", "settings": {"model.level_weights": {"kind": "adaptive"}}},
]


@pytest.fixture
def write_sweep(settings, write_config, tmp_path):
    def write(**changes):
        small = settings | {"model": {**settings["model"], "mixer": "log_linear_mamba2"}}
        tree = {
            "sweep_dir": str(tmp_path / "sweep"),
            "config": str(write_config(small)),
            "settings": {"training.total_steps": 3, "validation.every_steps": None},
            "arms": ARMS,
            "seed": [0, 1],
            "evaluate": ["--tasks mqar --pairs 2,4 --lengths 32 --vocab-size 64 --samples 8"],
        }
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump({**tree, **changes}))
        return path

    return write


def command(path, *options):
    return [sys.executable, "-m", "pretrain", "sweep", str(path), "--device", "cpu", *options]


def sweep(path, *options):
    return subprocess.run(
        command(path, *options), capture_output=True, text=True, cwd=ROOT, timeout=280
    )


def test_the_shipped_sweep_can_be_made():
    config = read(ROOT / "pretrain" / "configs" / "sweeps" / "wikitext2.yaml", TrainingSweep)
    assert len(config.runs()) == len(config.arms) * 2 * len(config.seed)
    assert len(config.seed) >= 3


def test_a_seed_of_all_arms_comes_before_the_next(write_sweep):
    config = read(write_sweep(axes={"model.d_model": [32, 64]}), TrainingSweep)
    assert [spec.key for spec in config.runs()][:4] == [
        "linear-d-model-32-s0",
        "adaptive-d-model-32-s0",
        "linear-d-model-32-s1",
        "adaptive-d-model-32-s1",
    ]
    assert len(config.runs()) == 8


@pytest.mark.slow
def test_runs_what_is_left_and_tells_what_failed(write_sweep, tmp_path):
    broken = {"name": "no-data", "settings": {"data.dataset": str(tmp_path / "nowhere")}}
    path = write_sweep(arms=[*ARMS, broken], seed=[0])
    failed = sweep(path, "--workers", "2")
    log = tmp_path / "sweep" / "logs" / "no-data-s0.log"
    assert failed.returncode == 1, failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("error: no-data-s0 failed: exit code 2: error: ")
    assert failed.stderr.endswith(f"; {log}\n")
    entries = json.loads((tmp_path / "sweep" / "table.json").read_text())
    found = {(e["arm"], e["metric"], e["settings"]["pairs"]): e["seeds"]["0"] for e in entries}
    for arm in ("linear", "adaptive"):
        (results,) = (tmp_path / "sweep" / "runs" / f"{arm}-s0").glob("eval/*/results.json")
        for entry in json.loads(results.read_text())["results"]:
            assert found.pop((arm, entry["metric"], entry["settings"]["pairs"])) == entry["value"]
    assert not found
    steps = tmp_path / "sweep" / "runs" / "linear-s0" / "log.jsonl"
    before = steps.read_bytes()
    path = write_sweep(seed=[0])
    again = sweep(path)
    assert again.returncode == 0, again.stderr
    assert "2 runs, 2 complete" in again.stdout
    assert re.search(r"\| linear \| [\d.]+ \| [\d.]+ \|", again.stdout)
    assert steps.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_it_leaves_no_process_and_goes_on(write_sweep, tmp_path, number):
    settings = {"training.total_steps": 4000, "validation.every_steps": None}
    path = write_sweep(seed=[0], arms=ARMS[:1], settings=settings)
    process = subprocess.Popen(command(path), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "sweep" / "runs" / "linear-s0"
    deadline = time.monotonic() + 120
    while not (run / "log.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(number)
    shown = process.communicate(timeout=150)[1]
    assert process.returncode == (143 if number == signal.SIGTERM else -number), shown
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert list((run / "checkpoints").glob("step-*"))
    if number == signal.SIGKILL:
        return
    process = subprocess.Popen(command(path), cwd=ROOT, stdout=subprocess.DEVNULL)
    log = tmp_path / "sweep" / "logs" / "linear-s0.log"
    deadline = time.monotonic() + 120
    while "resum" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    process.wait(timeout=150)
    assert "resum" in log.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": []}, "arms is wrong: got []"),
        ({"arms": [*ARMS, ARMS[0]]}, "two runs have one name: got linear-s0 twice"),
        ({"axes": {"model.d_model": []}}, "an axis has no values: got model.d_model: []"),
        ({"axes": {"model.width": [1]}}, "linear-width-1-s0 cannot be made: unknown setting"),
        ({"config": "nowhere.yaml"}, "no config: got nowhere.yaml; expected a run's YAML file"),
        ({"evaluate": []}, "evaluate is wrong: got []"),
        ({"lanes": 2}, "unknown setting: got lanes"),
    ],
)
def test_mistakes_are_one_line(write_sweep, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(write_sweep(**changes), TrainingSweep)
    assert len(str(error.value).splitlines()) == 1
