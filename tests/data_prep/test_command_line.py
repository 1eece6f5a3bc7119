from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import __main__ as command_line
from data_prep.__main__ import main
from data_prep.shards import Rows, read_manifest
from data_prep.sources import held_out, list_files
from data_prep.tokenizer import Tokenizer


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
    assert "document length in tokens" in shown
    assert run(monkeypatch, "inspect", dataset, "--samples", 0, "--at-least", 1000) == 0
    lengths = Rows(dataset, "train").row_lengths()
    counted = int((lengths >= 1000).sum())
    assert re.search(rf"1,000 +{counted} +\d", capsys.readouterr().out)
    assert run(monkeypatch, "verify", dataset) == 0
    assert "every file is what was written" in capsys.readouterr().out
    assert run(monkeypatch, "bench", dataset, "--seq-len", 64, "--seconds", 0.1) == 0
    assert "M tokens/s at seq_len 64" in capsys.readouterr().out
    shard = next((dataset / "train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run(monkeypatch, "verify", dataset) == 1
    assert "shard.00000.mds is damaged" in capsys.readouterr().err
    assert shown.count("validation row ") == 3
    assert "<document>" in shown


def test_a_tokenizer_is_evaluated_on_held_out_text(
    corpus: Path,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = corpus / "stdlib/json/decoder.py"
    assert run(monkeypatch, "tokenizer", "eval", model_file, path) == 0
    text, model = path.read_text(encoding="utf-8"), Tokenizer.load(model_file)
    tokens = len(model.encode(text))
    shown = capsys.readouterr().out
    assert f": {len(text.encode()) / tokens:.4f} bytes/token, {tokens} tokens" in shown
    assert model.sha256 in shown
    held = ("--validation-fraction", 0.5, "--seed", 1)
    assert run(monkeypatch, "tokenizer", "eval", model_file, corpus, *held) == 0
    documents = sum(
        held_out(segment.name, 0.5, 1) for segment in list_files([str(corpus)]) if segment.size
    )
    assert f" {documents} documents" in capsys.readouterr().out


def test_standard_input_is_packed_and_known_again(
    model_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = "".join(json.dumps({"text": f"line {n} of many"}) + "\n" for n in range(200)).encode()

    def piped(content: bytes, *arguments: object) -> int:
        stdin = io.TextIOWrapper(io.BytesIO(content))
        monkeypatch.setattr(sys, "stdin", stdin)
        return run(monkeypatch, *arguments)

    output = ("--output", tmp_path / "d", "--row-tokens", 64)
    pack = ("pack", "-", "--tokenizer", model_file, *output)
    assert piped(content, *pack) == 0
    assert read_manifest(tmp_path / "d").documents_in == 200
    assert piped(content, *pack) == 0
    assert "was complete already" in capsys.readouterr().out
    assert piped(content + b'{"text": "more"}', *pack) == 2
    assert "stdin there" in capsys.readouterr().err
    assert piped(content.replace(b"line 7 ", b"line 8 "), *pack) == 2
    assert "stdin there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    train = ("tokenizer", "-", "--output", tmp_path / "t.model", "--vocab-size", 300)
    assert piped(content, *train) == 0


def test_a_recipe_and_every_option_reach_the_manifest(
    corpus: Path, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"sources:\n  - {{inputs: [{corpus}/stdlib/json], weight: 1}}\n"
        f"  - {{inputs: [{corpus}/stdlib/logging], weight: 2}}\n"
    )
    options = ("--length-weight", "100:0.5", "--order", "longest-first", "--min-tokens", 4)
    pack = ("pack", "--tokenizer", model_file, "--output", tmp_path / "d", "--row-tokens", 64)
    assert run(monkeypatch, *pack, "--recipe", recipe, *options) == 0
    manifest = read_manifest(tmp_path / "d")
    assert manifest.arguments == [
        *("--recipe", str(recipe), "--min-tokens", "4", "--order", "longest-first"),
        *("--length-weight", "100:0.5"),
    ]
    again = ("pack", *manifest.arguments, "--tokenizer", model_file, "--output", tmp_path / "e")
    assert run(monkeypatch, *again, "--row-tokens", 64) == 0
    assert (tmp_path / "e/manifest.json").read_bytes() == (
        tmp_path / "d/manifest.json"
    ).read_bytes()


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


def test_a_terminated_pack_with_workers_ends_in_one_line(tmp_path: Path, model_file: Path) -> None:
    """Ray's handler would print a stack of C++ and lose the exit code."""
    lines = [json.dumps({"text": f"{n} " * 4000}) + "\n" for n in range(2000)]
    (tmp_path / "many.jsonl").write_text("".join(lines))
    command = ["pack", tmp_path / "many.jsonl", "--tokenizer", model_file, "--workers", 2]
    process = subprocess.Popen(
        [sys.executable, "-m", "data_prep", *map(str, command)]
        + ["--output", str(tmp_path / "d"), "--row-tokens", "64"],
        cwd=Path(command_line.__file__).parent.parent,
        stderr=subprocess.PIPE,
        text=True,
    )
    units = tmp_path / "d" / ".building" / "units"
    deadline = time.monotonic() + 120
    while not list(units.glob("*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    shown = process.communicate()[1].splitlines()
    assert process.returncode == 143, shown
    assert [line for line in shown if not line.startswith("tokenising")] == [
        "terminated; the same command goes on where it was"
    ]


def test_documents_that_the_tokenizer_is_not_evaluated_on_are_counted(
    tmp_path: Path,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.txt").write_bytes(b"")
    assert run(monkeypatch, "tokenizer", "eval", model_file, tmp_path) == 0
    shown = capsys.readouterr().out
    assert " 1 documents; " in shown
    assert "2 documents left out" in shown
    assert f"  1, not UTF-8: {tmp_path.name}/b.txt" in shown


def test_a_killed_readers_copy_of_standard_input_is_removed(
    corpus: Path, tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".d.{gone.pid}.stdin").write_text("left behind")
    (tmp_path / f".d.{os.getpid()}.stdin").write_text("of one that lives")
    (tmp_path / f".e.{gone.pid}.stdin").write_text("of another output")
    pack = ("--tokenizer", model_file, "--output", tmp_path / "d", "--row-tokens", 64)
    assert run(monkeypatch, "pack", corpus, *pack) == 0
    left = {f".d.{os.getpid()}.stdin", f".e.{gone.pid}.stdin", "d"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_empty_standard_input_leaves_nothing_behind(
    tmp_path: Path,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    pack = ("--tokenizer", model_file, "--output", tmp_path / "new" / "d", "--row-tokens", 64)
    assert run(monkeypatch, "pack", "-", *pack) == 2
    assert "no document in standard input: got 1 bytes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_get_one_line_and_exit_code_2(
    corpus: Path,
    model_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other").write_text("something else")
    (tmp_path / "empty").touch()
    new = ("--output", tmp_path / "d", "--row-tokens", 256)
    synthetic = ("--output", tmp_path / "d", "--rows", 5)
    no_folder = tmp_path / "other" / "d"
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # and does not listen
    dead = f"127.0.0.1:{closed.getsockname()[1]}"
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
        (("inspect", tmp_path, "--at-least", -3), "at-least is too small: got -3"),
        (("synth", "mqar", *synthetic, "--seed", -1), "seed is too small: got -1"),
        (("tokenizer", corpus, "--output", "x", "--vocab-size", -1), "too small: got -1"),
        (("pack", corpus, "--seed", -3, "--tokenizer", model_file, *new), "seed is too small"),
        (("pack", corpus, "--min-tokens", -5, "--tokenizer", model_file, *new), "got -5"),
        (("pack", corpus, "--length-weight", "5:nan", "--tokenizer", model_file, *new), "5:nan"),
        (
            ("pack", corpus, "--tokenizer", model_file, "--output", no_folder, "--row-tokens", 8),
            f"output {no_folder} cannot be made: got ",
        ),
        (
            ("pack", corpus, "--address", dead, "--workers", 2, "--tokenizer", model_file, *new),
            f"at {dead}; expected a running Ray head",
        ),
        (("pack", "--tokenizer", model_file, *new), "what to pack is unclear"),
        (("pack", corpus, "--recipe", "r", "--tokenizer", model_file, *new), "what to pack"),
        (("pack", corpus, "--length-weight", "x", "--tokenizer", model_file, *new), "got x"),
        (("pack", corpus, "--max-tokens", 2, "--tokenizer", model_file, *new), "got 2"),
        (("pack", corpus, "--order", "x", "--tokenizer", model_file, *new), "'x' is not one of"),
        (("pack", corpus, "--address", "x", "--tokenizer", model_file, *new), "is no address"),
        (("pack", "-", "-", "--tokenizer", model_file, *new), "standard input is given twice"),
        (
            (
                "pack",
                corpus,
                "--validation",
                "v",
                "--validation-fraction",
                "0.1",
                "--tokenizer",
                model_file,
                *new,
            ),
            "validation is given twice",
        ),
        (("tokenizer", "eval", model_file, tmp_path / "empty"), "no text to evaluate on"),
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
    closed.close()
