import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from launch import quickstart
from launch.quickstart_report import losses, parameter_count, read_results
from pretrain.config import load_config


def test_config_is_a_run_config():
    assert load_config(quickstart.CONFIG).model.level_weights.kind == "adaptive"


def test_stages_are_done_by_their_last_written_file_alone(tmp_path):
    changes = [f"run_dir={tmp_path / 'run'}", f"data.dataset={tmp_path / 'data'}"]
    config = load_config(quickstart.CONFIG, changes)
    step = f"step-{config.training.total_steps:08d}"
    last_written = [
        tmp_path / "data.model",
        tmp_path / "data" / "manifest.json",
        tmp_path / "run" / "checkpoints" / step / "checkpoint.json",
        tmp_path / "run" / "eval" / step / "results.json",
        tmp_path / "run" / "eval" / step / "sample.txt",
    ]
    for count in range(len(last_written) + 1):
        done = [stage.done() for stage in quickstart.stages(config, changes)]
        assert done == [i < count for i in range(len(last_written))]
        if count < len(last_written):
            last_written[count].parent.mkdir(parents=True, exist_ok=True)
            tasks = [{"task": "perplexity"}, {"task": "niah"}]
            last_written[count].write_text(json.dumps({"results": tasks}))


def test_half_an_evaluation_is_not_complete(tmp_path):
    path = tmp_path / "results.json"
    assert read_results(path) == []
    path.write_text(json.dumps({"results": [{"task": "perplexity"}]}))
    assert len(read_results(path)) == 1


def test_losses_skip_validation_lines_repeats_and_a_cut_line(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(
        '{"step": 1, "loss": 7.0}\n{"step": 2, "loss": 6.0}\n{"step": 2, "validation_loss": 6.5}\n'
        '{"step": 2, "loss": 5.5}\n{"step": 3, "lo'
    )
    assert losses(log) == [(1, 7.0), (2, 5.5)]


def test_parameter_count_is_read_from_the_header(tmp_path):
    import numpy as np

    save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, tmp_path / "w.safetensors")
    assert parameter_count(tmp_path / "w.safetensors") == 17


def test_failed_stage_stops_with_its_exit_code(tmp_path):
    with pytest.raises(quickstart.StageFailed) as stop:
        quickstart.run_stage(["eval", str(tmp_path / "none"), "--tasks", "niah"], None)
    assert stop.value.code == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_ends_with_its_table_and_again_without_work(tmp_path):
    argv = ["--data-dir", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]
    argv += ["training.total_steps=4", "schedule.warmup_steps=1", "model.num_layers=1"]
    argv += ["validation.rows=2", "batch.batch_tokens=2048", "batch.micro_batch_rows=2"]

    def run():
        return subprocess.run(
            [sys.executable, "-m", "launch.quickstart", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "120"},
        )

    first = run()
    assert first.returncode == 0, first.stdout
    for expected in ("Quickstart complete", "unigram entropy", "tensorboard --logdir", "Sample:"):
        assert expected in first.stdout
    files = {p: p.stat().st_mtime_ns for p in Path(tmp_path).rglob("*") if p.is_file()}
    second = run()
    assert second.returncode == 0
    assert second.stdout.count(": complete") == 5
    assert (
        second.stdout.split("Quickstart complete")[1]
        == first.stdout.split("Quickstart complete")[1]
    )
    assert {p: p.stat().st_mtime_ns for p in Path(tmp_path).rglob("*") if p.is_file()} == files
