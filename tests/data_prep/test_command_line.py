from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from data_prep import __main__ as command_line
from data_prep.__main__ import main
from data_prep.shards import read_manifest


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["data_prep", *map(str, arguments)])
    return main()


def test_from_files_to_an_inspected_data_set(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, dataset = tmp_path / "new" / "t.model", tmp_path / "d"
    train = ("tokenizer", corpus, "--output", model, "--vocab-size", 600)
    assert run(monkeypatch, *train) == 0
    assert "600 pieces" in capsys.readouterr().out
    assert run(monkeypatch, *train) == 0  # the same again
    pack = ("pack", corpus, "--tokenizer", model, "--output", dataset, "--row-tokens", 256)
    assert run(monkeypatch, *pack, "--validation-fraction", 0.3) == 0
    manifest = read_manifest(dataset)
    assert f"train {manifest.splits['train'].rows} rows" in capsys.readouterr().out
    assert run(monkeypatch, *pack, "--validation-fraction", 0.3) == 0
    assert "was complete already" in capsys.readouterr().out
    assert run(monkeypatch, "inspect", dataset, "--split", "validation", "--samples", 3) == 0
    shown = capsys.readouterr().out
    assert f"documents: {manifest.documents_in} in = {manifest.documents_in} written" in shown
    assert "documents, median" in shown
    assert shown.count("validation row ") == 3
    assert "<document>" in shown


def test_mqar_rows_are_shown_with_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synth = ("synth", "mqar", "--output", tmp_path / "m", "--rows", 10, "--validation-rows", 0)
    shape = ("--seq-len", 16, "--pairs", 2, "--vocab-size", 64, "--no-random-non-queries")
    assert run(monkeypatch, *synth, *shape) == 0
    assert run(monkeypatch, "inspect", tmp_path / "m", "--samples", 1) == 0
    shown = capsys.readouterr().out
    assert "train row 0" in shown
    assert shown.splitlines()[-1].count(">") == 2


def test_held_out_documents_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    texts = [path.read_text(encoding="utf-8") for path in corpus.rglob("*.py")]
    lines = [json.dumps({"text": line}) for text in texts for line in text.splitlines() if line]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    for name, fraction in (("whole", 0.0), ("part", 0.5), ("again", 0.5)):
        command = ("tokenizer", tmp_path / "all.jsonl", "--output", tmp_path / name)
        options = ("--vocab-size", 450, "--validation-fraction", fraction)
        assert run(monkeypatch, *command, *options) == 0
    assert (tmp_path / "part").read_bytes() == (tmp_path / "again").read_bytes()
    assert (tmp_path / "part").read_bytes() != (tmp_path / "whole").read_bytes()


def test_an_interrupt_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "inspect", interrupted)
    assert run(monkeypatch, "inspect", tmp_path) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on where it was\n"


def test_mistakes_get_one_line_and_exit_code_2(
    corpus: Path,
    model_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other").write_text("something else")
    new = ("--output", tmp_path / "d", "--row-tokens", 256)
    for arguments, message in (
        (("pack", tmp_path / "no", "--tokenizer", model_file, *new), "no does not exist"),
        (("pack", corpus, "--tokenizer", tmp_path / "no", *new), "tokenizer"),
        (("pack", corpus, "--tokenizer", tmp_path / "other", *new), "is not a tokenizer"),
        (("pack", corpus, *new), "Missing option '--tokenizer'"),
        (("tokenizer", corpus, "--output", tmp_path / "t", "--vocab-size", 10), "too small"),
        (
            ("tokenizer", corpus, "--output", tmp_path / "other", "--vocab-size", 500),
            "exists and is another tokenizer or file",
        ),
        (("synth", "mqar", "--output", tmp_path / "d", "--rows", 5, "--pairs", 99), "4 * pairs"),
        (("inspect", tmp_path), "is not a data set"),
        (("pack", corpus, "--bogus", "1"), "No such option"),
        ((), "Missing command"),
    ):
        assert run(monkeypatch, *arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1, captured.err
        assert message in captured.err
        assert captured.out == ""
    assert (tmp_path / "other").read_text() == "something else"
