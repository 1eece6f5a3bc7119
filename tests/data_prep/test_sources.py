from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from data_prep.formats import Document, Segment, Skipped
from data_prep.sources import (
    held_out,
    list_files,
    make_units,
    read_documents,
    sample_units,
)
from data_prep.stdlib_corpus import stdlib_files


def read_all(*inputs: Path | str, unit_bytes: int = 1000) -> list[Document | Skipped]:
    units = make_units(list_files([str(i) for i in inputs]), unit_bytes)
    return [document for unit in units for document in read_documents(unit)]


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    for name in ("b.txt", "a/z.py", "a/.hidden", ".git/config", "c.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    documents = read_all(root)
    assert documents == [
        Document("corpus/b.txt", ("b.txt",)),
        Document("corpus/c.txt", ("c.txt",)),
        Document("corpus/a/z.py", ("a/z.py",)),
    ]
    assert read_all(f"{root}/") == documents
    only = list_files([str(root)], include=["*.py"])
    assert [file.name for file in only] == ["corpus/a/z.py"]


def test_text_is_taken_byte_for_byte(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\r\x00\u2028\t\n\n"
    (tmp_path / "t.txt").write_bytes(text.encode())
    assert read_all(tmp_path / "t.txt") == [Document("t.txt", (text,))]


@pytest.mark.parametrize("unit_bytes", [1, 7, 50, 333, 10**6])
def test_jsonl_ranges_give_every_line_once_and_the_same_names(
    tmp_path: Path, unit_bytes: int
) -> None:
    path = tmp_path / "d.jsonl"
    lines = [json.dumps({"text": "\u00e9x" * (n % 17 + 1), "id": n}) for n in range(60)]
    path.write_text("\n".join([*lines[:30], "", *lines[30:]]))  # a blank line, no last newline
    whole = read_all(path, unit_bytes=10**9)
    assert [d.text for d in whole] == [json.loads(line)["text"] for line in lines]
    assert whole[1].name == f"d.jsonl@{len(lines[0]) + 1}"
    assert read_all(path, unit_bytes=unit_bytes) == whole


def test_what_cannot_be_read_is_skipped_with_a_reason(tmp_path: Path) -> None:
    root = tmp_path / "c"
    root.mkdir()
    (root / "a-binary.txt").write_bytes(b"\xff\xfe\x00")
    (root / "b-empty.txt").write_bytes(b"")
    (root / "c-dangling.txt").symlink_to(root / "nowhere")
    (root / "d-damaged.gz").write_bytes(gzip.compress(os.urandom(500))[:-200])
    (root / "e-fine.txt").write_text("fine")
    os.mkfifo(root / "f-pipe.txt")
    records = [b'{"text": ""}', b'{"text": 3}', b"[1]", b"{oops", b'"\xff"', b'{"text": "\\ud800"}']
    (root / "g.jsonl").write_bytes(b"\n".join(records))
    found = {d.name.removeprefix("c/"): d for d in read_all(root)}
    reasons = {name: d.reason for name, d in found.items() if isinstance(d, Skipped)}
    assert found.pop("e-fine.txt") == Document("c/e-fine.txt", ("fine",))
    assert len(reasons) == len(found) == 11
    assert reasons["a-binary.txt"] == "not UTF-8"
    assert reasons["b-empty.txt"] == "empty"
    assert reasons["c-dangling.txt"].startswith("unreadable: ")
    assert reasons["d-damaged.gz"].startswith("unreadable: ")
    assert reasons["f-pipe.txt"].startswith("unreadable: ")
    assert [reason for name, reason in reasons.items() if name.startswith("g.jsonl")] == [
        "empty",
        'no string field "text"',
        'no string field "text"',
        "not JSON",
        "not UTF-8",
        "lone surrogate in the text",
    ]


def test_a_file_given_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "t.txt")
    assert len(list_files([str(tmp_path), str(tmp_path / "t.txt")])) == 1


def test_missing_and_empty_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="input .*nothing does not exist: expected"):
        list_files([str(tmp_path / "nothing")])
    with pytest.raises(ValueError, match="no document in the inputs: got"):
        list_files([str(tmp_path)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no file"):
        list_files([str(tmp_path / "pipe")])


def test_units_keep_the_order_and_hold_about_their_size() -> None:
    sizes = [3, 3, 9, 0, 30, 1]
    files = [
        Segment(f"{n}.txt", f"{n}.txt", "text", size, "", size=size) for n, size in enumerate(sizes)
    ]
    units = make_units(files, 10)
    assert [[segment.file_bytes for segment in unit.segments] for unit in units] == [
        [3, 3],
        [9, 0],
        [30],
        [1],
    ]
    assert sample_units(units, 10**9, seed=0) == units
    some = sample_units(units, 20, seed=1)
    assert some == sample_units(units, 20, seed=1)
    assert 0 < len(some) < len(units)
    assert sum(unit.size for unit in some) >= 20


def test_holding_out_is_a_fair_coin_of_name_and_seed() -> None:
    names = [f"file{n}" for n in range(4000)]
    held = [name for name in names if held_out(name, 0.25, seed=1)]
    assert abs(len(held) - 1000) < 120
    assert held == [name for name in names if held_out(name, 0.25, seed=1)]
    assert held != [name for name in names if held_out(name, 0.25, seed=2)]
    assert set(held) < {name for name in names if held_out(name, 0.5, seed=1)}
    assert not any(held_out(name, 0.0, seed=1) for name in names)
    assert all(held_out(name, 1.0, seed=1) for name in names)


def test_the_standard_library_is_a_large_corpus_without_tests() -> None:
    found = dict(stdlib_files())
    assert list(found) == list(dict(stdlib_files()))
    assert "stdlib/json/decoder.py" in found
    assert sum(path.stat().st_size for path in found.values()) > 5e6
    assert not any("/test/" in name or "/tests/" in name for name in found)
    assert not any("site-packages" in name for name in found)
    assert [file.name for file in list_files(["stdlib"])] == list(found)
