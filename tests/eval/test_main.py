import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eval import __main__ as command
from eval import niah, selftest
from models.checkpoint_directory import step_folder, write_manifest
from models.tensor_files import as_lazy, open_tensors, save_tensors


def run(monkeypatch, *argv):
    """Exit code of `python -m eval *argv`, in this process."""
    monkeypatch.setattr(sys, "argv", ["eval", *map(str, argv)])
    with pytest.raises(SystemExit) as stop:
        command.main()
    return stop.value.code


def test_run_folder_is_evaluated_without_conversion(
    monkeypatch, capsys, tmp_path, model_dir, dataset, source_folder
):
    step_dir = step_folder(tmp_path, 3)
    shutil.copytree(model_dir, step_dir, ignore=shutil.ignore_patterns("eval"))
    write_manifest(step_dir, {"step": 3})
    common = (tmp_path, "--lengths", "600", "--samples", "2", "--answer-tokens", "4")
    text = source_folder / "this.txt"
    assert run(monkeypatch, *common, "--tasks", "perplexity,niah", "--text", text) in (0, None)
    assert run(monkeypatch, *common, "--tasks", "perplexity", "--dataset", dataset) in (0, None)
    content = json.loads((tmp_path / "eval" / "step-00000003" / "results.json").read_text())
    assert {r["task"] for r in content["results"]} == {"perplexity", "niah"}
    kinds = {r["settings"].get("split") for r in content["results"] if r["task"] == "perplexity"}
    assert kinds == {None, "validation"}
    assert list((tmp_path / "tensorboard" / "eval").iterdir())
    assert "nll_per_token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tasks", "perplexity,nihilism"), "unknown task: got nihilism"),
        (("--tasks", ""), "unknown task: got none"),
        (("--tasks", "niah", "--lengths", "25x"), "--lengths is not a list of lengths: got 25x"),
        (("--tasks", "niah", "--lengths", "2048"), "got 2048 tokens"),
        (("--tasks", "niah", "--device", "tpu"), "unknown device: got tpu"),
        (("--tasks", "perplexity", "--text", "/nowhere.txt"), "not found: got /nowhere.txt"),
        (("--tasks", "perplexity", "--dataset", "/nowhere"), "/nowhere"),
        (("--tasks", "wikitext"), "add --wikitext FILE"),
        (("--tasks", "mqar"), "add --dataset DATASET"),
        (("--tasks", "niah", "--seed", "-1"), "--seed is out of range: got -1; expected 0 to"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    monkeypatch, capsys, tmp_path, model_dir, argv, message
):
    output = tmp_path / "new" / "results.json"
    assert run(monkeypatch, model_dir, *argv, "--output", output) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (("--tasks", "niah,mqar"), "add --dataset DATASET"),
        (("--tasks", "niah,perplexity", "--text", "/nowhere.txt"), "not found: got /nowhere.txt"),
        (("--tasks", "niah,wikitext", "--wikitext", "/nowhere.raw"), "not found: got /nowhere.raw"),
    ],
)
def test_every_task_is_checked_before_the_first_runs(
    monkeypatch, capsys, tmp_path, model_dir, last, message
):
    output = tmp_path / "new" / "results.json"
    small = ("--lengths", "600", "--samples", "1", "--answer-tokens", "4", "--output", output)
    assert run(monkeypatch, model_dir, *small, *last) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not output.parent.exists()


def test_number_of_samples_keeps_results_apart(monkeypatch, tmp_path, model_dir):
    output = tmp_path / "results.json"
    common = ("--tasks", "niah", "--lengths", "600", "--answer-tokens", "4", "--output", output)
    for samples in (3, 2, 3):
        assert run(monkeypatch, model_dir, *common, "--samples", samples) in (0, None)
    results = json.loads(output.read_text())["results"]
    assert [r["count"] for r in results if r["metric"] == "accuracy"] == [3, 2]


def test_full_disk_is_one_line_and_exit_code_1(
    monkeypatch, capsys, tmp_path, model_dir, source_folder
):
    def full_disk(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output = tmp_path / "new" / "results.json"
    monkeypatch.setattr(os, "fsync", full_disk)
    text = ("--tasks", "perplexity", "--text", source_folder / "this.txt")
    assert run(monkeypatch, model_dir, *text, "--output", output) == 1
    progress, line = capsys.readouterr().err.splitlines()
    assert progress.startswith("perplexity on ")
    (samples,) = (output.parent / "samples").iterdir()
    assert line == f"error: cannot write {samples}: No space left on device"
    assert list(output.parent.iterdir()) == [samples.parent]


def test_output_below_a_file_is_refused_before_any_scoring(
    monkeypatch, capsys, tmp_path, model_dir
):
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "results.json"
    assert run(monkeypatch, model_dir, "--tasks", "niah", "--output", output) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: cannot write in {output.parent}: {output.parent} is not a folder"
    assert (tmp_path / "file").read_text() == "mine"


def test_model_without_a_finite_loss_is_a_failure_not_a_mistake(
    monkeypatch, capsys, tmp_path, model_dir, source_folder
):
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken, ignore=shutil.ignore_patterns("eval"))
    weights = {name: t.load() * float("nan") for name, t in open_tensors(model_dir).items()}
    save_tensors(broken, as_lazy(weights))
    text = ("--tasks", "perplexity", "--text", source_folder / "this.txt")
    assert run(monkeypatch, broken, *text) == 1
    _, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the model's loss has no perplexity: got nan nats")


def test_no_checkpoint_is_one_line_without_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "eval", str(tmp_path / "none"), "--tasks", "niah"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_model_without_tokenizer_reads_no_text(monkeypatch, capsys, tmp_path, model_dir):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_dir / name, tmp_path)
    assert run(monkeypatch, tmp_path, "--tasks", "niah") == 2
    assert "without tokenizer.model" in capsys.readouterr().err


def test_foreign_output_is_refused_before_any_scoring(monkeypatch, capsys, tmp_path, model_dir):
    output = tmp_path / "notes.json"
    output.write_text("mine")
    assert run(monkeypatch, model_dir, "--tasks", "niah", "--output", output) == 2
    assert output.read_text() == "mine"
    assert "give another --output" in capsys.readouterr().err


def test_finished_samples_are_not_scored_again(monkeypatch, tmp_path, model_dir):
    output = tmp_path / "results.json"
    common = ("--tasks", "niah", "--lengths", "600", "--answer-tokens", "4", "--output", output)
    assert run(monkeypatch, model_dir, *common, "--samples", "3") in (0, None)
    first = json.loads(output.read_text())
    (samples,) = (tmp_path / "samples").iterdir()
    lines = samples.read_text().splitlines()
    samples.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # killed while it wrote
    asked = []
    original = niah.complete
    monkeypatch.setattr(
        niah, "complete", lambda m, p, **k: (asked.extend(p), original(m, p, **k))[1]
    )
    output.unlink()
    assert run(monkeypatch, model_dir, *common, "--samples", "3") in (0, None)
    assert len(asked) == 1
    assert json.loads(output.read_text()) == first
    assert [p.name for p in (tmp_path / "plots").iterdir()] == ["niah_single_1.png"]


def test_every_checkpoint_of_a_run_makes_a_curve(
    monkeypatch, capsys, tmp_path, model_dir, source_folder
):
    for step in (2, 10):
        folder = step_folder(tmp_path, step)
        shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("eval"))
        write_manifest(folder, {"step": step})
    step_folder(tmp_path, 11).mkdir()  # never completed
    text = ("--tasks", "perplexity", "--text", source_folder / "this.txt")
    assert run(monkeypatch, tmp_path, *text, "--all-checkpoints") in (0, None)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "eval")).Reload()
    curve = [event.step for event in events.Scalars("eval/perplexity/nll_per_token")]
    assert curve == [2, 10]
    assert sorted(p.name for p in (tmp_path / "eval").iterdir()) == [
        "step-00000002",
        "step-00000010",
    ]
    assert run(monkeypatch, model_dir, *text, "--all-checkpoints") == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def test_several_models_are_scored_and_compared_in_one_command(
    monkeypatch, capsys, tmp_path, model_dir, source_folder
):
    models = [tmp_path / name for name in ("first", "second")]
    for folder in models:
        shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("eval"))
    text = ("--tasks", "perplexity", "--text", source_folder / "this.txt")
    assert run(monkeypatch, *models, *text, "--compare", tmp_path / "both") in (0, None)
    report = (tmp_path / "both" / "report.md").read_text()
    assert "| metric | unit | first | second |" in report
    assert run(monkeypatch, "compare", *models, "--output", tmp_path / "again") in (0, None)
    assert (tmp_path / "again" / "report.md").read_text() == report
    assert run(monkeypatch, *models, *text, "--output", tmp_path / "r.json") == 2
    assert "--output is for one model" in capsys.readouterr().err


def test_selftest_command_fails_where_a_check_does(monkeypatch, capsys):
    good, bad = (selftest.Line("niah", "oracle", "accuracy", v, 100.0) for v in (100.0, 50.0))
    monkeypatch.setattr(selftest, "run", lambda *_: [good])
    assert run(monkeypatch, "selftest") in (0, None)
    assert "ok" in capsys.readouterr().out
    monkeypatch.setattr(selftest, "run", lambda *_: [good, bad])
    assert run(monkeypatch, "selftest") == 1
    assert "1 of 2 checks do not hold: niah, oracle model" in capsys.readouterr().err


def test_checkpoint_knows_the_rows_it_was_trained_on(monkeypatch, capsys, tmp_path, model_dir):
    folder = step_folder(tmp_path, 1)
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("eval"))
    write_manifest(folder, {"step": 1, "config": {"data": {"seq_len": 512}}})
    common = ("--tasks", "niah", "--samples", "1", "--answer-tokens", "4", "--lengths", "600")
    assert run(monkeypatch, tmp_path, *common) == 2
    assert "longer than the rows the model was trained on: got 600" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path, *common, "--beyond-trained") in (0, None)
    (results,) = tmp_path.glob("eval/*/results.json")
    for result in json.loads(results.read_text())["results"]:
        assert result["settings"]["trained_length"] == 512


def test_rows_of_a_data_set_are_cut_to_those_of_the_training(
    monkeypatch, tmp_path, model_dir, dataset
):
    folder = step_folder(tmp_path, 1)
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("eval"))
    write_manifest(folder, {"step": 1, "config": {"data": {"seq_len": 16}}})
    assert run(monkeypatch, tmp_path, "--tasks", "perplexity", "--dataset", dataset) in (0, None)
    (results,) = tmp_path.glob("eval/*/results.json")
    for result in json.loads(results.read_text())["results"]:
        assert result["settings"]["row_tokens"] == 16
        assert "trained_length" not in result["settings"]
