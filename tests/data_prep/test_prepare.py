from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import corpus as corpus_module
from data_prep import prepare as prepare_module
from data_prep.dataset_folder import WORK_FOLDER
from data_prep.prepare import prepare
from data_prep.recipe import PackRequest, Source
from data_prep.shards import Manifest, Rows, read_manifest, read_tokenizer
from data_prep.sources import held_out
from data_prep.tokenizer import Tokenizer

UNIT_BYTES = 20_000  # several units of the small corpus
SHARD_BYTES = 40 * 512  # 40 rows of 256 tokens of 2 bytes


@pytest.fixture(autouse=True, scope="module")
def small_units_and_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "UNIT_BYTES", UNIT_BYTES)
        patch.setattr(prepare_module, "SHARD_BYTES", SHARD_BYTES)
        yield


def request_for(corpus: Path, **changes: Any) -> PackRequest:
    settings = {"row_tokens": 256, "validation_fraction": 0.3, "seed": 2, **changes}
    settings.setdefault("sources", (Source(inputs=(str(corpus),)),))
    return PackRequest(**settings)


def files_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished_files(
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    small_units_and_shards: None,
) -> dict[str, str]:
    """The data set of request_for(corpus), made by one undisturbed process."""
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    prepare(request_for(corpus), tokenizer, folder, workers=1)
    return files_of(folder)


def test_packed_rows_are_the_documents_to_the_token(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    manifest, made = prepare(request_for(corpus), tokenizer, tmp_path / "d", workers=1)
    assert made
    assert not (tmp_path / "d" / WORK_FOLDER).exists()
    assert read_tokenizer(tmp_path / "d").sha256 == manifest.tokenizer_sha256
    paths = [
        p for folder in ("json", "logging") for p in sorted((corpus / "stdlib" / folder).iterdir())
    ]
    assert manifest.documents_in == len(paths)
    for split, facts in manifest.splits.items():
        chosen = [
            path.read_text(encoding="utf-8")
            for path in paths
            if held_out(f"corpus/{path.relative_to(corpus)}", 0.3, 2) == (split == "validation")
        ]
        assert chosen
        stream = [
            token
            for text in chosen
            for token in (tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id)
        ]
        rows = Rows(tmp_path / "d", split)
        packed = np.concatenate([rows[i].tokens for i in range(len(rows))])
        assert len(packed) == facts.tokens == facts.rows * 256
        assert packed.tolist() == stream[: len(packed)]
        assert len(stream) - len(packed) == facts.dropped_tokens["tail"] < 256
        assert len(list((tmp_path / "d" / split).glob("*.mds"))) > 1
        assert (
            facts.bytes
            == len("".join(chosen).encode()) - tokenizer.token_bytes[stream[len(packed) :]].sum()
        )
        for i in range(len(rows)):
            begins = np.flatnonzero(rows[i].tokens == tokenizer.bos_id)
            assert rows[i].document_starts.tolist() == sorted({0, *begins.tolist()})


def test_documents_in_are_documents_written_or_skipped_with_a_reason(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    root = tmp_path / "mixed"
    shutil.copytree(corpus, root)
    (root / "zz").mkdir()
    (root / "zz" / "a-binary").write_bytes(b"\xff\xff")
    for n in range(7):
        (root / "zz" / f"b-empty{n}").write_bytes(b"")
    (root / "zz" / "c-tail").write_text("the last words")
    manifest, _ = prepare(
        request_for(root, validation_fraction=0.0), tokenizer, tmp_path / "d", workers=1
    )
    assert set(manifest.splits) == {"train"}
    assert manifest.documents_in == len(files_of(root)) == manifest.splits["train"].documents + 9
    assert manifest.skipped["empty"].count == 7
    assert manifest.skipped["empty"].examples == [f"mixed/zz/b-empty{n}" for n in range(5)]
    assert manifest.skipped["not UTF-8"].examples == ["mixed/zz/a-binary"]
    assert manifest.skipped["begins in the dropped tail"].examples == ["mixed/zz/c-tail"]


def test_ray_workers_write_the_same_bytes(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, finished_files: dict[str, str]
) -> None:
    prepare(request_for(corpus), tokenizer, tmp_path / "d", workers=2)
    assert files_of(tmp_path / "d") == finished_files


def test_a_crash_at_any_step_of_writing_leaves_no_data_set_and_loses_nothing(
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every file becomes visible through os.replace: crash before the 1st, the 2nd, ... of them."""

    class Crash(BaseException):
        pass

    monkeypatch.setattr(prepare_module, "UNIT_BYTES", 4 * UNIT_BYTES)
    monkeypatch.setattr(prepare_module, "SHARD_BYTES", 5 * SHARD_BYTES)
    prepare(request_for(corpus), tokenizer, tmp_path / "whole", workers=1)
    finished_files = files_of(tmp_path / "whole")
    assert len(list((tmp_path / "whole" / "train").glob("*.mds"))) > 1
    real = os.replace
    crashes = 0
    while True:
        folder = tmp_path / f"crash{crashes}"
        calls = 0

        def replace(source: Path, target: Path, crashes: int = crashes) -> None:
            nonlocal calls
            if calls == crashes:
                raise Crash
            calls += 1
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        try:
            prepare(request_for(corpus), tokenizer, folder, workers=1)
        except Crash:
            pass
        else:
            break
        monkeypatch.setattr(os, "replace", real)
        with pytest.raises(FileNotFoundError, match="is not a data set"):
            read_manifest(folder)
        prepare(request_for(corpus), tokenizer, folder, workers=1)
        assert files_of(folder) == finished_files
        crashes += 1
    assert crashes > 20


def test_a_killed_process_is_continued_by_the_same_command(
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "d"
    code = (
        "import sys, time; from data_prep import prepare as p; "
        f"p.UNIT_BYTES, p.SHARD_BYTES = {UNIT_BYTES}, {SHARD_BYTES}; real = p.tokenise_unit\n"
        "def slow(*a): counts = real(*a); time.sleep(1); return counts\n"
        "p.tokenise_unit = slow; from data_prep.__main__ import main; sys.exit(main())"
    )
    command = ["pack", str(corpus), "--tokenizer", str(model_file), "--output", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command, "--row-tokens", "256", "--workers", "1"]
    )
    units = folder / WORK_FOLDER / "units"
    deadline = time.monotonic() + 60
    while len(list(units.glob("*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(ValueError, match="is being written by another process"):
        prepare(request_for(corpus, validation_fraction=0.0), tokenizer, folder, workers=1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in units.glob("*.npz")}
    assert len(kept) >= 2
    remade = []
    original = prepare_module.tokenise_unit

    def counted(tools: Any, job: Any) -> Any:
        remade.append(job.path)
        return original(tools, job)

    monkeypatch.setattr(prepare_module, "tokenise_unit", counted)
    request = request_for(corpus, validation_fraction=0.0, seed=0)
    prepare(request, tokenizer, folder, workers=1)
    assert remade
    assert not {str(path) for path in kept} & set(remade)
    prepare(request, tokenizer, tmp_path / "whole", workers=1)
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_a_finished_data_set_is_recognised_and_others_are_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    root = tmp_path / "corpus"
    shutil.copytree(corpus, root)
    first, made = prepare(request_for(root), tokenizer, folder, workers=1)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (folder / WORK_FOLDER / "units").mkdir(parents=True)  # killed while it was cleaning up
    again, remade = prepare(request_for(root), tokenizer, folder, workers=1)
    assert made
    assert not remade
    assert first == again
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for changes, message in (
        ({"row_tokens": 128}, "row_tokens there is 256, asked for 128"),
        ({"validation_fraction": 0.5}, "validation_fraction there is 0.3, asked for 0.5"),
        ({"seed": 9}, "seed there is 2, asked for 9"),
    ):
        with pytest.raises(ValueError, match=f"made with other settings: {message}"):
            prepare(request_for(root, **changes), tokenizer, folder, workers=1)
    (root / "more.txt").write_text("more")
    with pytest.raises(ValueError, match=r"corpus/more\.txt there absent, now 4 bytes"):
        prepare(request_for(root), tokenizer, folder, workers=1)
    for path in before:
        assert path.exists()


def test_an_input_that_changed_is_named_and_a_copy_is_the_same(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    root = tmp_path / "corpus"
    shutil.copytree(corpus, root)
    prepare(request_for(root), tokenizer, folder, workers=1)
    shutil.copytree(root, tmp_path / "elsewhere" / "corpus", copy_function=shutil.copyfile)
    assert not prepare(request_for(tmp_path / "elsewhere/corpus"), tokenizer, folder, workers=1)[1]
    path = root / "stdlib/json/decoder.py"
    content = path.read_bytes()
    stat = path.stat()
    path.write_bytes(content[:100] + b"#" + content[101:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = "of other inputs: corpus/stdlib/json/decoder.py there .* sha256 .*, now .* sha256"
    with pytest.raises(ValueError, match=changed):
        prepare(request_for(root), tokenizer, folder, workers=1)
    path.unlink()
    with pytest.raises(ValueError, match=r"json/decoder.py there .*, now absent"):
        prepare(request_for(root), tokenizer, folder, workers=1)
    path.write_bytes(content)
    halves = [(str(root / "stdlib/json"),), (str(root / "stdlib/logging"),)]
    both, turned = ((Source(inputs=a + b),) for a, b in (halves, halves[::-1]))
    prepare(request_for(root, sources=both), tokenizer, tmp_path / "both", workers=1)
    with pytest.raises(ValueError, match=r"input 1 there .*json/.*, now .*logging/"):
        prepare(request_for(root, sources=turned), tokenizer, tmp_path / "both", workers=1)


def test_a_file_too_large_to_hash_is_known_by_its_time(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "HASHED_BYTES", 10_000)
    root = tmp_path / "corpus"
    shutil.copytree(corpus, root)
    prepare(request_for(root), tokenizer, tmp_path / "d", workers=1)
    assert not prepare(request_for(root), tokenizer, tmp_path / "d", workers=1)[1]
    path = root / "stdlib/json/decoder.py"
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="decoder.py there .* mtime .*, now .* mtime 1;"):
        prepare(request_for(root), tokenizer, tmp_path / "d", workers=1)


def test_foreign_output_is_not_touched(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and no data set"):
        prepare(request_for(corpus), tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"mine\.txt is a file: expected a folder"):
        prepare(request_for(corpus), tokenizer, tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_validation_from_its_own_files(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    train, validation = str(corpus / "stdlib/logging"), str(corpus / "stdlib/json")
    sources = (Source(inputs=(train,)), Source(inputs=(validation,), split="validation"))
    request = request_for(corpus, sources=sources, validation_fraction=0.0)
    manifest, _ = prepare(request, tokenizer, tmp_path / "d", workers=1)
    assert manifest.inputs == [train, validation]
    first = Rows(tmp_path / "d", "validation")[0]
    text = (corpus / "stdlib/json/__init__.py").read_text(encoding="utf-8")
    assert text.startswith(tokenizer.decode(first.tokens[:200].tolist()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_tokens": 1}, "row-tokens is too small: got 1"),
        ({"validation_fraction": 1.0}, "validation-fraction is out of range: got 1.0"),
        ({"row_tokens": 10**6}, "the train split has no full row: got [0-9]+ tokens; expected"),
        ({"validation_fraction": 1e-9}, "the validation split has no full row: got 0 tokens"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(request_for(corpus, **changes), tokenizer, tmp_path / "d", workers=1)
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_the_same_file_on_both_sides_and_unreadable_corpora_are_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    both = (Source(inputs=(str(corpus),)), Source(inputs=(str(corpus),), split="validation"))
    request = request_for(corpus, sources=both, validation_fraction=0.0)
    with pytest.raises(ValueError, match="a file is in both splits: got .*py"):
        prepare(request, tokenizer, tmp_path / "d")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "x").write_bytes(b"\xff")
    with pytest.raises(
        ValueError, match=r"no document could be read: got 1 not UTF-8 \(such as bad/x"
    ):
        prepare(request_for(bad), tokenizer, tmp_path / "d")
    with pytest.raises(ValueError, match="workers is too small: got 0"):
        prepare(request_for(corpus), tokenizer, tmp_path / "d", workers=0)


def test_manifest_is_plain_json_that_reads_back(
    finished_files: dict[str, str], corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    manifest, _ = prepare(request_for(corpus), tokenizer, tmp_path / "d", workers=1)
    text = (tmp_path / "d" / "manifest.json").read_text()
    assert Manifest.model_validate(json.loads(text)) == manifest == read_manifest(tmp_path / "d")
    assert hashlib.sha256(text.encode()).hexdigest() == finished_files["manifest.json"]
