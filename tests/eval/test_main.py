import json
import shutil
import subprocess
import sys

import pytest

from eval import __main__ as command
from models.checkpoint_directory import step_folder, write_manifest


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
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(monkeypatch, capsys, model_dir, argv, message):
    assert run(monkeypatch, model_dir, *argv) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


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
