"""Corpora as they come: every odd file is named or taken, nothing is lost, memory stays bounded."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import dataset_folder
from data_prep.dataset_folder import WORK_FOLDER
from data_prep.prepare import prepare
from data_prep.recipe import PackRequest, Source
from data_prep.shards import Manifest, Rows, read_tokenizer
from data_prep.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent


def pack(folder: Path, output: Path, tokenizer: Tokenizer) -> Manifest:
    request = PackRequest(sources=(Source(inputs=(str(folder),)),), row_tokens=8)
    return prepare(request, tokenizer, output, workers=1)[0]


def text_of(dataset: Path) -> str:
    rows = Rows(dataset, "train")
    tokenizer = read_tokenizer(dataset)
    return tokenizer.decode([i for n in range(len(rows)) for i in rows[n].tokens.tolist()])


def test_odd_files_are_written_or_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "a-empty.txt").write_bytes(b"")
    (folder / "b-binary.txt").write_bytes(b"good\xffbad")
    (folder / "c-windows.txt").write_bytes(b"one\r\ntwo\r\n\tthree\r\n")
    (folder / "d-one-token.txt").write_bytes(b"e")
    (folder / "e-nothing.txt.gz").write_bytes(b"")
    (folder / "f-cut.txt.gz").write_bytes(gzip.compress(os.urandom(4000))[:1000])
    lines = [
        b'{"text": "windows\\r\\nline"}\r',
        b'{"text": "\xff"}',
        b"",
        b"{",
        b'{"text": "last"}',
    ]
    (folder / "g-mixed.jsonl").write_bytes(b"\n".join(lines))
    (folder / "g-zero.jsonl.gz").write_bytes(b"")
    (folder / "g-zero.jsonl").write_bytes(b"")
    (folder / "h-filler.txt").write_text("filler words " * 20)
    manifest = pack(folder, tmp_path / "d", tokenizer)
    named = {reason: entry.examples for reason, entry in manifest.skipped.items()}
    cut = [reason for reason in named if reason.startswith("unreadable: ")]
    assert named["empty"] == [
        "odd/a-empty.txt",
        "odd/e-nothing.txt.gz",
        "odd/g-zero.jsonl",
        "odd/g-zero.jsonl.gz",
    ]
    assert named["not UTF-8"] == ["odd/b-binary.txt", "odd/g-mixed.jsonl@29"]
    assert named[cut[0]] == ["odd/f-cut.txt.gz"]
    assert named["not JSON"] == ["odd/g-mixed.jsonl@44"]
    assert manifest.documents_in == 13
    text = text_of(tmp_path / "d")
    assert text.startswith("one\r\ntwo\r\n\tthree\r\n" + "e" + "windows\r\nline" + "last")


def test_a_folder_with_nothing_to_read_is_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    with pytest.raises(ValueError, match="no document in the inputs: got .*bad"):
        pack(folder, tmp_path / "d", tokenizer)
    (folder / "a.txt").write_bytes(b"\xff")
    (folder / "b.txt").write_bytes(b"")
    message = (
        r"no document could be read: got 1 not UTF-8 \(such as bad/a.txt\); 1 empty "
        r"\(such as bad/b.txt\)"
    )
    with pytest.raises(ValueError, match=message):
        pack(folder, tmp_path / "d", tokenizer)
    (folder / "a.txt").write_text("now there is something to read")
    assert pack(folder, tmp_path / "d", tokenizer).documents_in == 2


@pytest.mark.parametrize("writes", [0, 1, 3, 5])
def test_a_full_disk_is_said_in_one_line_and_the_next_run_continues(
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: int,
) -> None:
    """The disk is full after so many files; a real one behaves the same (docs/data.md)."""
    left = writes
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= 1
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="cannot be written: No space left .*make room and run"):
            pack(corpus, tmp_path / "d", tokenizer)
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "d" / "manifest.json").exists()
    assert (tmp_path / "d" / WORK_FOLDER).is_dir()
    pack(corpus, tmp_path / "d", tokenizer)
    pack(corpus, tmp_path / "whole", tokenizer)
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            other = tmp_path / "d" / path.relative_to(tmp_path / "whole")
            assert other.read_bytes() == path.read_bytes()
    assert dataset_folder.WORK_FOLDER not in os.listdir(tmp_path / "d")


MEASURED = """
import resource, sys
sys.argv[0] = "data_prep"
from data_prep.__main__ import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
status = main()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("grown", (after - before) >> 10)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_line_of_100_mb_costs_no_more_memory_than_a_short_one(
    tmp_path: Path, model_file: Path, suffix: str
) -> None:
    block = "A quiet line of prose, \u00e9\U0001f600 and \\ more; " * 500
    path = tmp_path / f"long.{suffix}"
    with path.open("w", encoding="utf-8") as file:
        part = block if suffix == "txt" else json.dumps(block)[1:-1]
        file.write("" if suffix == "txt" else '{"text": "')
        written = 0
        while written < 100 << 20:
            file.write(part)
            written += len(part.encode())
        file.write("" if suffix == "txt" else '"}\n')
    command = [sys.executable, "-c", MEASURED, "pack", str(path), "--tokenizer", str(model_file)]
    command += ["--output", str(tmp_path / "d"), "--row-tokens", "4096", "--workers", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "documents: 1 in = 1 written + 0 skipped" in done.stdout
    # A shard of 64 MB is packed in one piece; the text alone would be 400 MB as a Python string.
    assert int(done.stdout.split("grown")[1]) < 350


@pytest.mark.slow
def test_two_packs_at_once_and_one_right_after_a_kill(
    corpus: Path, model_file: Path, tmp_path: Path
) -> None:
    """Each with a Ray of its own on this machine."""

    def start(output: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "data_prep", "pack", str(corpus), "--workers", "2"]
        command += ["--tokenizer", str(model_file), "--output", str(tmp_path / output)]
        return subprocess.Popen(
            [*command, "--row-tokens", "64"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    first, second = start("a"), start("b")
    units = tmp_path / "a" / WORK_FOLDER / "units"
    while not list(units.glob("*.npz")) and first.poll() is None:
        time.sleep(0.05)
    first.kill()
    first.wait()
    again = start("a")
    for process in (second, again):
        assert process.communicate(timeout=280)[0].count("documents: 8 in = 8 written") == 1
        assert process.returncode == 0
    for path in (tmp_path / "b" / "train").iterdir():
        assert (tmp_path / "a" / "train" / path.name).read_bytes() == path.read_bytes()
