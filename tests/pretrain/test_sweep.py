import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from models.weights import load_model
from pretrain.sweep_config import load_sweep
from pretrain.sweep_file import LOCK_NAME
from pretrain.sweep_run import (
    RESULT_NAME,
    STATE_NAME,
    SweepRun,
    drawn,
    finished_result,
    logits_at,
    train_run,
)
from pretrain.sweep_table import markdown, summaries
from tests.small_sweeps import ROOT, SHIPPED, command, sweep, tree

CPU = torch.device("cpu")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_can_be_made(path):
    config = load_sweep(path)
    assert len({spec.key for spec in config.runs()}) == len(config.runs())
    assert len(config.grid.seed) >= 3


def test_levels_apply_to_log_linear_mixers_only(tmp_path):
    grid = {"mixer": ["mamba2", "log_linear_mamba2"], "level_weights": ["fixed", "adaptive"]}
    config = sweep(tmp_path, grid={**grid, "pairs": [2], "seed": [0]})
    arms = [(spec.mixer, spec.level_weights) for spec in config.runs()]
    assert arms == [
        ("mamba2", None),
        ("log_linear_mamba2", "fixed"),
        ("log_linear_mamba2", "adaptive"),
    ]
    kinds = [config.model_of(spec).level_weights.kind for spec in config.runs()[1:]]
    assert kinds == ["fixed", "adaptive"]


def test_an_arm_of_ones_own_is_its_settings(tmp_path):
    at_one = {"name": "linear-at-1", "settings": {"kind": "linear", "offset": 0.5413}}
    softmax = {"name": "softmax", "settings": {"kind": "adaptive", "activation": "softmax"}}
    arms = ["linear", at_one, softmax]
    grid = {"mixer": ["log_linear_mamba2"], "level_weights": arms, "pairs": [2], "seed": [0]}
    config = sweep(tmp_path, grid=grid)
    found = {spec.key: config.model_of(spec).level_weights for spec in config.runs()}
    assert [key.split("-d16")[0] for key in found] == [
        "log_linear_mamba2-linear",
        "log_linear_mamba2-linear-at-1",
        "log_linear_mamba2-softmax",
    ]
    assert [(x.kind, x.offset, x.activation) for x in found.values()] == [
        ("linear", 0.0, "softplus"),
        ("linear", 0.5413, "softplus"),
        ("adaptive", 0.0, "softmax"),
    ]


def test_number_of_levels_is_that_of_the_longest_row_for_every_arm(tmp_path):
    config = sweep(tmp_path, grid={"seq_len": [16, 32], "pairs": [2]})
    assert {config.model_of(spec).max_seq_len for spec in config.runs()} == {32}


def test_a_run_broken_off_goes_on_to_the_same_bits(tmp_path):
    config = sweep(tmp_path)
    spec = config.runs()[0]
    whole = train_run(config, spec, tmp_path / "whole", CPU)
    broken = SweepRun(config, spec, tmp_path / "broken", CPU)
    for _ in range(5):
        broken.advance()
    assert (tmp_path / "broken" / STATE_NAME).is_file()
    again = SweepRun(config, spec, tmp_path / "broken", CPU)
    assert again.history.step == 4
    del broken
    (tmp_path / "broken" / f"{STATE_NAME}.1.tmp").touch()  # killed while it wrote
    resumed = train_run(config, spec, tmp_path / "broken", CPU)
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}
    one, two = (load_model(tmp_path / name / "model") for name in ("whole", "broken"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert sorted(p.name for p in (tmp_path / "broken").iterdir()) == ["model", RESULT_NAME]


def test_logits_at_labels_are_those_of_the_whole_model(tmp_path):
    config = sweep(tmp_path)
    run = SweepRun(config, config.runs()[1], tmp_path / "r", CPU)
    rows = drawn(config.task.rows_of(16, 2), 4, "test", 0, "cpu")
    some = logits_at(run.model, rows.tokens, rows.where)
    every = run.model(rows.tokens)
    expected = every.gather(1, rows.where[:, :, None].expand(-1, -1, every.shape[2]))
    torch.testing.assert_close(some, expected)
    assert rows.labels.shape == rows.where.shape == (4, 2)


def test_every_row_is_seen_once_an_epoch_in_the_order_asked_for(tmp_path):
    train = [{"seq_len": 16, "pairs": 2, "rows": 20}, {"seq_len": 32, "pairs": 4, "rows": 12}]
    mix = {"train": train, "test": [{"seq_len": 16, "pairs": 2, "rows": 8}]}
    grid = {"seq_len": [], "pairs": [], "seed": [0]}
    for order in ("listed", "shuffled"):
        config = sweep(tmp_path, mix=mix, grid=grid, training={"order": order})
        run = SweepRun(config, config.runs()[0], tmp_path / order, CPU)
        assert run.epoch_steps == 3 + 2
        for epoch in (0, 1):
            batches = [run._batch(epoch * 5 + i) for i in range(5)]
            seen = [(b.segment, row) for b in batches for row in b.rows.tolist()]
            everything = [(0, i) for i in range(20)] + [(1, i) for i in range(12)]
            assert sorted(seen) == everything
            assert (seen == everything) == (order == "listed")


def test_learning_rates_follow_the_schedule(tmp_path):
    epochs = {"total_steps": None, "epochs": 4}
    for kind, expected in (
        ("constant", [1, 1, 1]),
        ("cosine", [1, 0.5, 0.1464]),
        ("cosine-by-epoch", [1, 0.5, 0.1464]),
    ):
        config = sweep(tmp_path, training={**epochs, "schedule": kind})
        run = SweepRun(config, config.runs()[0], tmp_path / kind, CPU)
        assert run.total_steps == 12
        rates = [run._learning_rate(step) / 0.01 for step in (0, 6, 9)]
        assert rates == pytest.approx(expected, abs=1e-3)
        if kind == "cosine-by-epoch":
            assert run._learning_rate(8) == run._learning_rate(6)


def test_a_diverging_run_ends_and_is_counted(tmp_path):
    config = sweep(tmp_path, grid={"peak_lr": [1e30], "pairs": [2], "seed": [0]})
    (spec,) = config.runs()
    result = train_run(config, spec, tmp_path / "r", CPU)
    assert result["diverged"]
    assert result["steps"] <= 8
    (row,) = summaries(config, {spec: result})
    assert row["diverged"] == 1
    assert row["solved_share"] == 0
    assert "1 diverged" in markdown(config, {spec: result})


def test_command_trains_writes_the_table_and_goes_on(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree(tmp_path / "sweep")))
    done = command(path, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "sweep"
    config = load_sweep(path)
    results = {
        spec: json.loads((folder / "runs" / spec.key / RESULT_NAME).read_text())
        for spec in config.runs()
    }
    table = (folder / "table.md").read_text()
    assert table == markdown(config, results)
    assert table in done.stdout
    assert "4 of 4 runs complete" in table
    # One is lost; it alone is run again, here in a process of its own beside another.
    lost = folder / "runs" / config.runs()[2].key
    before = {p: p.stat().st_mtime_ns for p in folder.glob(f"runs/*/{RESULT_NAME}")}
    shutil.rmtree(lost)
    again = command(path, "--device", "cpu", "--workers", "2")
    assert again.returncode == 0, again.stderr
    assert "4 runs, 3 complete" in again.stdout
    assert (folder / "table.md").read_text() == table
    after = {p: p.stat().st_mtime_ns for p in folder.glob(f"runs/*/{RESULT_NAME}")}
    assert [p for p in after if after[p] != before[p]] == [lost / RESULT_NAME]


@pytest.mark.slow
def test_workers_end_with_a_killed_sweep_and_the_same_command_goes_on(tmp_path):
    path = tmp_path / "sweep.yaml"
    training = {"total_steps": 100_000, "stop_accuracy": None}
    path.write_text(yaml.safe_dump(tree(tmp_path / "sweep", training=training)))
    argv = [sys.executable, "-m", "pretrain", "sweep", str(path), "--device", "cpu"]
    parent = subprocess.Popen([*argv, "--workers", "2"], cwd=ROOT, stdout=subprocess.DEVNULL)
    states = tmp_path / "sweep" / "runs"
    deadline = time.monotonic() + 200
    while len(list(states.glob(f"*/{STATE_NAME}"))) < 2:
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.2)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    config = load_sweep(path)
    steps = [
        SweepRun(config, spec, states / spec.key, CPU).history.step for spec in config.runs()[:2]
    ]
    assert min(steps) >= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {"pairs": [5]}}, "seq-len does not fit 5 pairs: got 16"),
        ({"grid": {"mixer": ["mamba3"]}}, "grid.mixer.0 is wrong: got 'mamba3'"),
        (
            {"grid": {"level_weights": ["exponential"]}},
            "grid.level_weights.0: unknown kind of lambda: got exponential; expected fixed, linear",
        ),
        (
            {"grid": {"level_weights": [{"name": "linear", "settings": {"kind": "fixed"}}]}},
            "the name of a kind has its meaning: got linear for {'kind': 'fixed'}",
        ),
        (
            {"grid": {"level_weights": [{"name": "mine", "settings": {"offset": 1}}]}},
            "settings lack kind: got {'offset': 1} for mine",
        ),
        ({"grid": {"seq_len": []}}, "rows are given by grid.seq_len and grid.pairs, or by mix"),
        ({"model": {"attention": {"num_heads": 3}}}, "num_heads=3 does not divide d_model=16"),
        ({"training": {"epochs": 3}}, "needs one of epochs and total_steps: got 3 and 8"),
        ({"lanes": 3}, "unknown setting: got lanes"),
        ({"model": {"level_weights": 3}}, "model.level_weights is wrong: got 3; expected settings"),
        ({"task": {"variant": "s4"}}, "unknown variant of MQAR: got s4"),
        ({"grid": {"peak_lr": [-1]}}, "grid.peak_lr.0 is wrong: got -1; expected greater than 0"),
        ({"grid": {"seed": [-1]}}, "grid.seed.0 is wrong: got -1; expected greater than or equal"),
        ({"grid": {"seed": [0, 0]}}, "seed repeats a value: got [0, 0]; expected each once"),
        ({"grid": {"peak_lr": [0.1, 0.10000001]}}, "peak_lr repeats a value: got ['0.1', '0.1']"),
        ({"training": {"betas": [2, 0.9]}}, "training.betas.0 is wrong: got 2; expected less than"),
    ],
)
def test_mistakes_are_one_line(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        sweep(tmp_path, **changes)
    assert len(str(error.value).splitlines()) == 1


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "broken off"])
def test_other_settings_in_the_folder_of_a_sweep_are_refused_and_nothing_is_touched(
    tmp_path, complete
):
    config = sweep(tmp_path)
    spec = config.runs()[0]
    folder = config.sweep_dir / "runs" / spec.key
    (config.sweep_dir / LOCK_NAME).parent.mkdir()
    (config.sweep_dir / LOCK_NAME).touch()
    run = SweepRun(config, spec, folder, CPU)
    while run.history.step < 2 or (complete and not run.complete):
        run.advance()
    if complete:
        run.finish()
    assert (folder / RESULT_NAME).exists() == complete
    before = contents(config.sweep_dir)
    sweep(tmp_path, training={"total_steps": 16})
    done = command(tmp_path / "sweep.yaml", "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {folder} holds a run with other settings: training.total_steps: there 8, now 16; "
        "choose another sweep_dir\n"
    )
    assert contents(config.sweep_dir) == before


def test_a_folder_of_something_else_is_refused_and_nothing_is_touched(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("mine")
    sweep(tmp_path)
    done = command(tmp_path / "sweep.yaml", "--sweep-dir", tmp_path / "docs")
    assert done.returncode == 2
    assert done.stderr.startswith("error: sweep_dir holds files of something else: got ")
    assert len(done.stderr.splitlines()) == 1
    assert contents(tmp_path / "docs") == {tmp_path / "docs" / "page.md": b"mine"}


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x02" + bytes(7) + b"{}"])
def test_a_state_that_is_junk_is_named_and_the_run_starts_anew(tmp_path, capsys, junk):
    config = sweep(tmp_path)
    spec = config.runs()[0]
    (tmp_path / STATE_NAME).write_bytes(junk)
    assert finished_result(config, spec, tmp_path) is None
    assert SweepRun(config, spec, tmp_path, CPU).history.step == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path / STATE_NAME} is no state of a run: got ")


@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [(signal.SIGINT, 130, 1), pytest.param(signal.SIGTERM, 143, 2, marks=pytest.mark.slow)],
)
def test_signal_ends_a_sweep_in_one_line_and_the_same_command_goes_on(
    tmp_path, number, code, workers
):
    sweep(tmp_path, training={"total_steps": 100_000, "stop_accuracy": None})
    argv = [sys.executable, "-m", "pretrain", "sweep", str(tmp_path / "sweep.yaml")]
    parent = subprocess.Popen(
        [*argv, "--device", "cpu", "--workers", str(workers)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while len(list((tmp_path / "sweep").glob(f"runs/*/{STATE_NAME}"))) < workers:
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.1)
    os.killpg(parent.pid, number)  # a terminal's Ctrl-C reaches every process
    _, errors = parent.communicate(timeout=200)
    assert errors == f"stopped by {number.name}: start the same command again to go on\n"
    assert parent.returncode == code


def test_command_refuses_in_one_line_with_exit_code_2(tmp_path):
    done = command(tmp_path / "none.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no sweep: got ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.gpu
def test_runs_share_a_gpu(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree(tmp_path / "sweep", grid={"mixer": ["log_linear_mamba2"]})))
    done = command(path, "--device", "cuda", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "2 processes on cuda" in done.stdout
    assert "4 of 4 runs complete" in (tmp_path / "sweep" / "table.md").read_text()
