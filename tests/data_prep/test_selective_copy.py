from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.selective_copy import SelectiveCopyTask, draw_block
from data_prep.shards import IGNORED_LABEL, Rows, read_manifest
from data_prep.synth import draw_rows, write_task


def block(task: SelectiveCopyTask, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return draw_block(task, rows, np.random.default_rng(seed))


@pytest.mark.parametrize(("seq_len", "copied", "vocab_size"), [(12, 3, 8), (64, 16, 16), (8, 4, 3)])
def test_s4_repeats_the_data_at_the_markers(seq_len: int, copied: int, vocab_size: int) -> None:
    task = SelectiveCopyTask(seq_len=seq_len, copied=copied, vocab_size=vocab_size)
    tokens, labels = block(task, 300)
    places = seq_len - copied
    assert (tokens[:, places:] == vocab_size - 1).all()
    assert (labels[:, :places] == IGNORED_LABEL).all()
    for row, answers in zip(tokens, labels, strict=True):
        data = row[:places][row[:places] != 0]
        assert data.tolist() == answers[places:].tolist()
        assert len(data) == copied
        assert data.min() >= 1
        assert data.max() <= vocab_size - 2


def test_s4_draws_with_repetition_and_everywhere() -> None:
    task = SelectiveCopyTask(seq_len=40, copied=8, vocab_size=6)
    tokens, labels = block(task, 4000)
    data = labels[:, 32:]
    counts = np.bincount(data.ravel(), minlength=6)[1:5]
    assert np.abs(counts - 8000).max() < 6 * np.sqrt(8000)
    assert any(len(set(row)) < 4 for row in data.tolist())
    where = (tokens[:, :32] != 0).sum(0)
    assert np.abs(where - 1000).max() < 6 * np.sqrt(1000)


@pytest.mark.parametrize(
    ("seq_len", "copied", "vocab_size"), [(13, 3, 14), (256, 16, 128), (33, 16, 128), (3, 1, 7)]
)
def test_adaptive_decay_repeats_distinct_data_from_the_separator_on(
    seq_len: int, copied: int, vocab_size: int
) -> None:
    task = SelectiveCopyTask(
        seq_len=seq_len, copied=copied, vocab_size=vocab_size, variant="adaptive-decay"
    )
    tokens, labels = block(task, 300)
    places = seq_len - copied - 1
    assert (tokens[:, places] == 1).all()
    assert (tokens[:, places + 1 :] == 2).all()
    assert (labels[:, :places] == IGNORED_LABEL).all()
    assert (labels[:, -1] == IGNORED_LABEL).all()
    for row, answers in zip(tokens, labels, strict=True):
        body = row[:places]
        data = body[np.isin(body, list(task.data_ids))]
        assert data.tolist() == answers[places:-1].tolist()
        assert len(set(data.tolist())) == len(data) == copied
        assert np.isin(body[~np.isin(body, list(task.data_ids))], list(task.noise_ids)).all()


def test_ids_are_those_of_the_published_experiment() -> None:
    task = SelectiveCopyTask(seq_len=256, vocab_size=128, variant="adaptive-decay")
    assert (task.data_ids[0], task.data_ids[-1], len(task.data_ids)) == (3, 65, 63)
    assert (task.noise_ids[0], task.noise_ids[-1], len(task.noise_ids)) == (67, 127, 61)
    assert len(SelectiveCopyTask(seq_len=4128).data_ids) == 14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"copied": 0}, "copied is too small: got 0"),
        ({"seq_len": 31}, "seq-len does not fit 16 copied tokens: got 31; expected at least 32"),
        ({"vocab_size": 2}, "vocab-size does not fit: got 2; expected 3 to"),
        ({"variant": "adaptive-decay", "vocab_size": 34}, "got 34; expected 35 to"),
        ({"variant": "adaptive-decay", "seq_len": 32, "vocab_size": 128}, "expected at least 33"),
        ({"variant": "zoology"}, "unknown variant of selective copying: got zoology"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectiveCopyTask(**{"seq_len": 64, **changes})  # type: ignore[arg-type]


def test_smallest_vocabulary_that_is_named_can_be_drawn() -> None:
    for copied in (1, 2, 16):
        smallest = max(7, 2 * copied + 3)
        task = SelectiveCopyTask(
            seq_len=64, copied=copied, vocab_size=smallest, variant="adaptive-decay"
        )
        assert len(block(task, 5)[0]) == 5


def test_written_rows_are_the_drawn_rows(tmp_path: Path) -> None:
    task = SelectiveCopyTask(seq_len=40, copied=4)
    manifest, made = write_task(task, tmp_path / "c", rows=7, validation_rows=3, seed=2)
    assert made
    assert manifest.kind == "selective-copy"
    rows = Rows(tmp_path / "c", "validation")
    for i, (tokens, labels) in enumerate(draw_rows(task, 3, split="validation", seed=2)):
        assert np.array_equal(rows[i].tokens, tokens)
        assert np.array_equal(rows[i].labels, labels)
    assert not write_task(task, tmp_path / "c", rows=7, validation_rows=3, seed=2)[1]


@pytest.mark.parametrize(
    ("name", "variant", "vocab_size"),
    [
        ("mqar", "zoology", 8192),
        ("mqar", "adaptive-decay", 128),
        ("selective-copy", "s4", 16),
        ("selective-copy", "adaptive-decay", 128),
    ],
)
def test_both_variants_of_both_tasks_have_a_command(
    name: str, variant: str, vocab_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["synth", name, "--variant", variant, "--rows", "4", "--validation-rows", "2"]
    monkeypatch.setattr(sys, "argv", ["data_prep", *command, "--output", str(tmp_path / "d")])
    assert main() == 0
    manifest = read_manifest(tmp_path / "d")
    assert (manifest.kind, manifest.vocab_size) == (name, vocab_size)
    assert manifest.settings["variant"] == variant
