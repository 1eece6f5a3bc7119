"""Which folders are complete checkpoints."""

import hashlib
import json
import logging
from pathlib import Path

import pytest

from models.checkpoint_directory import (
    newest_complete,
    read_manifest,
    resolve,
    step_folder,
    verify,
    write_atomically,
    write_manifest,
)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    folder = step_folder(run, step)
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "rank-0.pt").write_bytes(b"optimizer" * (step % 1000))
    (folder / "model.safetensors").write_bytes(b"weights" * (step % 1000))
    (folder / "config.json").write_text("{}")
    if complete:
        write_manifest(folder, {"step": step})
    return folder


def test_manifest_lists_every_file_and_the_facts(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 3)
    manifest = read_manifest(folder)
    assert manifest["step"] == 3
    assert manifest["format_version"] == 1
    assert set(manifest["files"]) == {"engine/rank-0.pt", "model.safetensors", "config.json"}
    assert manifest["files"]["engine/rank-0.pt"]["bytes"] == 27
    assert verify(folder) == []


def test_another_tokenizer_is_named_with_both_hashes(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 3, complete=False)
    (folder / "tokenizer.model").write_bytes(b"the one of training")
    write_manifest(folder, {"step": 3})
    (folder / "tokenizer.model").write_bytes(b"another")
    assert verify(folder) == [
        f"tokenizer.model does not have the recorded sha256: got {sha256(b'another')}; "
        f"expected {sha256(b'the one of training')}"
    ]
    with pytest.raises(ValueError, match=sha256(b"another")):
        resolve(folder)


def test_written_manifest_can_be_written_again(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 3)
    (folder / "model.safetensors").write_bytes(b"other")
    write_manifest(folder, {"step": 3})
    assert verify(folder) == []
    assert "checkpoint.json" not in read_manifest(folder)["files"]


def test_missing_cut_and_changed_files_are_named(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 3)
    (folder / "config.json").unlink()
    (folder / "engine" / "rank-0.pt").write_bytes(b"cut")
    (folder / "model.safetensors").write_bytes(b"WEIGHTS" * 3)
    assert sorted(verify(folder)) == [
        "config.json is missing",
        "engine/rank-0.pt has 3 bytes, expected 27",
        f"model.safetensors does not have the recorded sha256: got {sha256(b'WEIGHTS' * 3)}; "
        f"expected {sha256(b'weights' * 3)}",
    ]
    assert "model.safetensors" not in " ".join(verify(folder, hashes=False))
    assert "model.safetensors" not in " ".join(verify(folder, only=("config.json",)))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "has no table of files"),
        ('{"format_version": 9, "files": {}}', "format_version 9; this version reads 1"),
        ('{"format_version": 1, "files": {"../x": {"bytes": 1, "sha256": ""}}}', "outside"),
        ('{"format_version": 1, "files": {"/x": {"bytes": 1, "sha256": ""}}}', "outside"),
        ('{"format_version": 1, "files": {"x": {"bytes": 1}}}', "without bytes and sha256"),
    ],
)
def test_damaged_manifest_is_a_problem(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text(content)
    (found,) = verify(tmp_path)
    assert problem in found


def test_facts_cannot_replace_what_the_manifest_sets(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 1, complete=False)
    with pytest.raises(ValueError, match="may not be named \\['files'\\]"):
        write_manifest(folder, {"files": {}})


def test_empty_folder_cannot_become_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no files to list"):
        write_manifest(tmp_path, {})


def test_newest_complete_passes_over_and_names_newer_ones(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 9)
    good = _checkpoint(tmp_path, 10)
    damaged = _checkpoint(tmp_path, 100)
    (damaged / "engine" / "rank-0.pt").write_bytes(b"optimizes" * 100)
    _checkpoint(tmp_path, 1000, complete=False)
    (tmp_path / "checkpoints" / "step-abc").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00001000")
    newest, passed_over = newest_complete(tmp_path)
    assert newest == good
    assert passed_over == [
        f"step-00001000 passed over: {step_folder(tmp_path, 1000)} has no checkpoint.json, "
        "so it was never completed",
        "step-00000100 passed over: engine/rank-0.pt does not have the recorded sha256: got "
        f"{sha256(b'optimizes' * 100)}; expected {sha256(b'optimizer' * 100)}",
    ]


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 99_999_999)
    beyond = _checkpoint(tmp_path, 100_000_000)
    assert newest_complete(tmp_path) == (beyond, [])


def test_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) == (None, [])


def test_resolve_accepts_run_step_and_model_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    good = _checkpoint(run, 1)
    _checkpoint(run, 2, complete=False)
    plain.mkdir()
    for name in ("config.json", "model.safetensors"):
        (plain / name).write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert resolve(run) == good
    assert "step-00000002 passed over" in caplog.text
    assert resolve(run / "checkpoints") == good
    assert resolve(good) == good
    assert resolve(str(plain)) == plain


def test_resolve_refuses_what_is_not_complete(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        resolve(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint in .*; expected a run"):
        resolve(tmp_path)
    half = _checkpoint(tmp_path, 5, complete=False)
    with pytest.raises(ValueError, match="is not complete: .* has no checkpoint.json"):
        resolve(half)
    with pytest.raises(FileNotFoundError, match="step-00000005 passed over"):
        resolve(tmp_path)


def test_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, b"one")
    write_atomically(path, json.dumps([2]).encode())
    assert path.read_bytes() == b"[2]"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_leftover_of_a_killed_writer_is_not_listed(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 1, complete=False)
    (folder / "model.safetensors.123.tmp").write_bytes(b"half")
    write_manifest(folder, {})
    assert "model.safetensors.123.tmp" not in read_manifest(folder)["files"]
