"""Files of every format and compression, damaged ones, and documents too long to hold."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep import formats
from data_prep.formats import Reading, Skipped, Unreadable
from data_prep.long_json import LongObject
from data_prep.sources import PLAIN, list_files, make_units, read_documents

Read = tuple[str, str] | Skipped


def read_all(*inputs: Path | str, unit_bytes: int = 1000, reading: Reading = PLAIN) -> list[Read]:
    """(name, text) of each document as the packer would take it, or why it was skipped."""
    units = make_units(list_files([str(i) for i in inputs]), unit_bytes, reading)
    found: list[Read] = []
    for unit in units:
        for document in read_documents(unit):
            if isinstance(document, Skipped):
                found.append(document)
                continue
            try:
                text = document.text
            except Unreadable as error:
                found.append(Skipped(document.name, str(error)))
            else:
                found.append((document.name, text))
    return found


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every document of over 40 bytes is a long one."""
    monkeypatch.setattr(formats, "LONG_BYTES", 40)
    monkeypatch.setattr(formats, "BLOCK_BYTES", 16)


def zstd_frames(content: bytes) -> bytes:
    half = len(content) // 2
    compress = zstandard.ZstdCompressor().compress
    return compress(content[:half]) + compress(content[half:])


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd_frames,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    "": bytes,
}


def parquet_bytes(columns: dict[str, list[Any]], rows_a_group: int = 10) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer, row_group_size=rows_a_group)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_format_reads_alike_under_every_compression(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS[suffix]
    lines = b'{"text": "a", "id": 7}\n{"text": "b\\n", "id": "x"}\n'
    contents = {
        "t.txt": b"text\r\n\t\n",
        "d.jsonl": lines,
        "p.parquet": parquet_bytes({"text": ["a", "b\n"], "id": ["7", "x"]}),
    }
    for name, content in contents.items():
        (tmp_path / (name + suffix)).write_bytes(compress(content))
    reading = Reading(id_field="id")
    assert read_all(tmp_path / f"t.txt{suffix}") == [(f"t.txt{suffix}", "text\r\n\t\n")]
    for name in ("d.jsonl", "p.parquet"):
        path = tmp_path / (name + suffix)
        assert read_all(path, reading=reading) == [("7", "a"), ("x", "b\n")]
        assert [text for _, text in read_all(path)] == ["a", "b\n"]


@pytest.mark.parametrize("suffix", [s for s in COMPRESS if s])
def test_an_empty_compressed_file_is_empty_and_a_cut_one_unreadable(
    tmp_path: Path, suffix: str
) -> None:
    (tmp_path / f"a.txt{suffix}").write_bytes(b"")
    (tmp_path / f"b.txt{suffix}").write_bytes(COMPRESS[suffix](os.urandom(5000))[:-900])
    first, second = read_all(tmp_path)
    assert isinstance(first, Skipped)
    assert isinstance(second, Skipped)
    assert first.reason == "empty" or first.reason.startswith("unreadable: ")
    assert second.reason.startswith("unreadable: ")
    assert second.name.endswith(f"b.txt{suffix}")


def test_parquet_is_cut_between_row_groups_without_changing_documents(tmp_path: Path) -> None:
    texts = [f"{n} " * 40 for n in range(95)]
    path = tmp_path / "p.parquet"
    path.write_bytes(parquet_bytes({"text": texts, "other": list(range(95))}))
    units = make_units(list_files([str(path)]), 800)
    assert len(units) > 3
    assert sum(unit.size for unit in units) <= path.stat().st_size
    assert read_all(path, unit_bytes=800) == [(f"p.parquet@{n}", t) for n, t in enumerate(texts)]


def test_parquet_that_does_not_fit_is_skipped_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet_bytes({"body": ["a"]}))
    (tmp_path / "b.parquet").write_bytes(parquet_bytes({"text": ["ok", None, ""]}))
    (tmp_path / "c.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "d.parquet").write_bytes(parquet_bytes({"text": []}))
    name = tmp_path.name
    assert read_all(tmp_path)[:4] == [
        Skipped(f"{name}/a.parquet", 'no column "text"'),
        (f"{name}/b.parquet@0", "ok"),
        Skipped(f"{name}/b.parquet@1", 'no string field "text"'),
        Skipped(f"{name}/b.parquet@2", "empty"),
    ]
    assert read_all(tmp_path)[5] == Skipped(f"{name}/d.parquet", "empty")
    last = read_all(tmp_path)[4]
    assert isinstance(last, Skipped)
    assert last.reason.startswith("unreadable: ")


def test_remote_files_folders_and_globs_read_as_local_ones(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    for name in ("a.txt", "b/c.jsonl", "b/.hidden"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"text": "x"}\n{"text": "y"}\n')
    url = f"file://{root}"
    assert read_all(url) == read_all(root)
    assert read_all(f"{url}/b/c.jsonl", unit_bytes=5) == [("c.jsonl@0", "x"), ("c.jsonl@14", "y")]
    assert [name for name, _ in read_all(f"{url}/**/*.jsonl")] == [
        "corpus/b/c.jsonl@0",
        "corpus/b/c.jsonl@14",
    ]
    with pytest.raises(FileNotFoundError, match="does not exist or holds no file"):
        list_files([f"file://{tmp_path}/nothing/"])
    with pytest.raises((ValueError, FileNotFoundError), match="nosuchprotocol"):
        list_files(["nosuchprotocol://x"])


def test_globs_match_files_in_sorted_order(tmp_path: Path) -> None:
    for name in ("a/1.txt", "b/2.txt", "b/3.md"):
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_text(name)
    assert read_all(f"{tmp_path}/c/*/*.txt") == [("c/a/1.txt", "a/1.txt"), ("c/b/2.txt", "b/2.txt")]
    with pytest.raises(FileNotFoundError, match="matches no file"):
        list_files([f"{tmp_path}/c/*.zip"])


def test_a_hugging_face_data_set_is_read_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "named"
    folder.mkdir()
    lines = "".join(json.dumps({"body": f"text {n}", "n": str(n)}) + "\n" for n in range(30))
    (folder / "train.jsonl").write_text(lines)
    typed = f"hf:{folder}?split=train"
    reading = Reading(text_field="body", id_field="n")
    read = read_all(typed, unit_bytes=100, reading=reading)
    assert read == [(str(n), f"text {n}") for n in range(30)]
    assert len(make_units(list_files([typed]), 100, reading)) > 2
    with pytest.raises(ValueError, match="input is not understood"):
        list_files(["hf:name?nonsense=1"])
    with pytest.raises(ValueError, match="cannot be loaded"):
        list_files([f"hf:{folder}?split=nowhere"])


def test_long_text_is_what_a_short_one_would_be(tmp_path: Path, small_blocks: None) -> None:
    text = "\ufeffone\r\n" + "\u00e9\U0001f600\u4e2d" * 200 + "\x00\u2028\t\n\n"
    (tmp_path / "t.txt").write_bytes(text.encode())
    assert read_all(tmp_path / "t.txt") == [("t.txt", text)]
    (tmp_path / "bad.txt").write_bytes(text.encode() + b"\xff" + b"x" * 50)
    assert read_all(tmp_path / "bad.txt") == [Skipped("bad.txt", "not UTF-8")]
    (tmp_path / "cut.txt").write_bytes(text.encode() + "\u4e2d".encode()[:2])
    assert read_all(tmp_path / "cut.txt") == [Skipped("cut.txt", "not UTF-8")]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("unit_bytes", [30, 700, 10**6])
def test_long_lines_are_what_json_makes_of_them(
    tmp_path: Path, small_blocks: None, ascii_only: bool, unit_bytes: int
) -> None:
    rng = random.Random(3)
    pieces = ['"', "\\", "\n", "\u00e9", "\U0001f600", "\u4e2d", "word ", "\\u0041", "{", "]", "\t"]
    records = []
    for n in range(60):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 150)))
        nested = {"a": ["]", {"text": "no"}], "b": None}
        record = {"meta": nested, "text": text, "after": [1, 2.5e3, 'x"y'], "id": n}
        if n % 3 == 0:
            record = {"id": f"i{n}", "text": text}
        records.append(record)
    blank = " " if ascii_only else ""
    lines = [json.dumps(r, ensure_ascii=ascii_only) + blank for r in records]
    (tmp_path / "d.jsonl").write_bytes(("\r\n".join(lines) + "\n\n").encode())
    expected = [(str(r["id"]), r["text"]) for r in records]
    reading = Reading(id_field="id")
    assert read_all(tmp_path / "d.jsonl", unit_bytes=unit_bytes, reading=reading) == expected
    named = read_all(tmp_path / "d.jsonl", unit_bytes=unit_bytes)
    assert [name for name, _ in named][1] == f"d.jsonl@{len(lines[0].encode()) + 2}"
    assert [text for _, text in named] == [r["text"] for r in records]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "%s"' % (b"x" * 80), "not JSON"),
        (b'{"text": "%s"} 1' % (b"x" * 80), "not JSON"),
        (b'{"text": "%s\\q"}' % (b"x" * 80), "not JSON"),
        (b'["%s"]' % (b"x" * 80), "not JSON"),
        (b'{"text": "%s\xff"}' % (b"x" * 80), "not UTF-8"),
        (b'{"text": "%s\\ud800"}' % (b"x" * 80), "lone surrogate in the text"),
        (b'{"text": 3, "b": "%s"}' % (b"x" * 80), 'no string field "text"'),
        (b'{"b": "%s", "text": ""}' % (b"x" * 80), "empty"),
        (b'{"text": "%s", "b": nope}' % (b"x" * 80), "not JSON"),
        (b'{"b": [[{"c": "%s"}], "text": "x"}' % (b"x" * 80), "not JSON"),
        (b"x" * 90, "not JSON"),
    ],
)
def test_damaged_long_lines_are_skipped_and_the_next_line_is_read(
    tmp_path: Path, small_blocks: None, line: bytes, reason: str
) -> None:
    (tmp_path / "d.jsonl").write_bytes(line + b'\n{"text": "next"}\n')
    first, second = read_all(tmp_path / "d.jsonl")
    assert first == Skipped("d.jsonl@0", reason)
    assert second == (f"d.jsonl@{len(line) + 1}", "next")


def test_a_long_line_costs_memory_of_a_few_blocks() -> None:
    def blocks() -> Any:
        yield b'{"before": "'
        for _ in range(40):
            yield b"y" * (1 << 20)
        yield b'", "text": "'
        for _ in range(60):
            yield b"x\\n" * (1 << 18)
        yield b'"}\n'

    tracemalloc.start()
    length = sum(map(len, LongObject(blocks(), "text", None).text_parts()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert length == 60 * (2 << 18)
    assert peak < 50 << 20  # of 85 MB; the largest part is the search through one block


def test_documents_are_named_by_their_id_where_they_have_one(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a", "key": "k\\n1"}\n{"text": "b"}\n')
    reading = Reading(id_field="key")
    assert read_all(tmp_path / "d.jsonl", reading=reading) == [("k\\n1", "a"), ("d.jsonl@29", "b")]
