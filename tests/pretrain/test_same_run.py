"""What a run may change when it goes on from a checkpoint, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, float]]]


def changed(settings: dict[str, Any], override: str) -> dict[str, Any]:
    """`settings` after one section.key=value."""
    path, _, value = override.partition("=")
    *sections, key = path.split(".")
    tree = settings
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = yaml.safe_load(value)
    return settings


def test_other_settings_are_refused_and_listed_in_one_line(
    settings: dict[str, Any], run_dir: Path, write_config: WriteConfig, run_ranks: Any
) -> None:
    before = sorted(run_dir.rglob("*"))
    changes = ("optimizer.weight_decay=0.2", "model.level_weights.kind=fixed")
    refused = run_ranks(write_config(settings), *changes)
    assert refused.exit_codes == [2]
    (line,) = refused.output.splitlines()
    assert "optimizer.weight_decay: checkpoint: 0.1, now: 0.2" in line
    assert "model.level_weights.kind: checkpoint: adaptive, now: fixed" in line
    assert sorted(run_dir.rglob("*")) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=4", "seed: checkpoint: 3, now: 4"),
        ("data.shuffle_seed=1", "data.shuffle_seed: checkpoint: 0, now: 1"),
        ("data.seq_len=16", "data.seq_len: checkpoint: 32, now: 16"),
        ("batch.batch_tokens=256", "batch.batch_tokens: checkpoint: 128, now: 256"),
        ("optimizer.clip_norm=null", "optimizer.clip_norm: checkpoint: 1.0, now: None"),
        ("parallel.precision=bf16", "parallel.precision: checkpoint: fp32, now: bf16"),
        ("training.total_steps=20", "training.total_steps: checkpoint: 10, now: 20"),
        ("training.total_steps=2", "checkpoint is at step 3, now: 2"),
        ("optimizer.peak_lr=0.001", "optimizer.peak_lr: checkpoint: 0.003, now: 0.001"),
        ("optimizer.kind=muon", "optimizer.kind: checkpoint: adamw, now: muon"),
        ("model.d_model=64", "model.d_model: checkpoint: 32, now: 64"),
        (
            "model.level_weights.kind=fixed",
            "model.level_weights.kind: checkpoint: adaptive, now: fi",
        ),
        ("health.spike_action=skip", "health.spike_action: checkpoint: log, now: skip"),
    ],
)
def test_settings_that_change_the_result_are_refused(
    start: Any, settings: dict[str, Any], run_dir: Path, override: str, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        start(changed(settings, override))
    assert message in str(caught.value)
    assert str(run_dir) in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.loader_threads=2",
        "batch.micro_batch_rows=2",
        "validation.every_steps=null",
        "checkpoint.every_steps=1",
        "logging.every_steps=1",
        "parallel.zero_stage=1",
        "parallel.activation_checkpointing=full",
        "training.loss_chunk_tokens=16",
        "health.hang_seconds=null",
    ],
)
def test_settings_that_change_no_result_are_accepted(
    start: Any, settings: dict[str, Any], run_dir: Path, override: str
) -> None:
    found = start(changed(settings, override))
    assert found.folder == run_dir / "checkpoints/step-00000003"


def test_what_may_change_is_named_and_accepted_when_allowed(
    start: Any, settings: dict[str, Any], run_dir: Path
) -> None:
    settings["optimizer"] |= {"clip_norm": 0.5, "peak_lr": 1e-3}
    settings["seed"] = 4
    with pytest.raises(ValueError) as caught:
        start(settings)
    hint = "checkpoint.allow_changed=[optimizer.clip_norm,optimizer.peak_lr]"
    assert str(caught.value).endswith(f"or allow what may change: {hint}")
    settings["checkpoint"]["allow_changed"] = ["optimizer", "seed"]
    with pytest.raises(ValueError, match="seed: checkpoint: 3, now: 4; choose another") as caught:
        start(settings)  # what may not change is not to be allowed
    assert "clip_norm" not in str(caught.value)
    settings["seed"] = 3
    assert start(settings).step == 3


def test_checkpoint_of_an_earlier_format_is_refused(
    start: Any, settings: dict[str, Any], run_dir: Path
) -> None:
    manifest = run_dir / "checkpoints/step-00000003/checkpoint.json"
    facts = json.loads(manifest.read_text())
    del facts["state_format"]
    manifest.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="got state_format 1; expected 2; evaluate or export it"):
        start(settings)


def test_batch_that_no_longer_splits_is_refused_with_the_numbers(
    settings: dict[str, Any], run_dir: Path, write_config: WriteConfig, run_ranks: Any
) -> None:
    refused = run_ranks(write_config(settings), ranks=3)
    assert refused.exit_codes == [2, 2, 2]
    assert (
        "got 128; expected a multiple of data.seq_len * batch.micro_batch_rows * ranks = 32 * "
        "1 * 3 = 96; use 96 or 192" in refused.output
    )


def test_data_set_may_move_but_not_change(
    start: Any, settings: dict[str, Any], run_dir: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(settings["data"]["dataset"], tmp_path / "copy")
    settings["data"]["dataset"] = str(copy)
    assert start(settings).folder == run_dir / "checkpoints/step-00000003"
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["splits"]["train"]["index_sha256"] = "0" * 64
    manifest["tokenizer_sha256"] = "1" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    settings["checkpoint"]["allow_changed"] = ["data", "data set"]
    with pytest.raises(ValueError, match="data set's train_index_sha256: checkpoint: ") as caught:
        start(settings)
    assert f"data set's tokenizer_sha256: checkpoint: None, now: {'1' * 64}" in str(caught.value)


def test_longer_run_is_accepted_while_the_learning_rates_so_far_are_equal(
    start: Any, settings: dict[str, Any], run_dir: Path
) -> None:
    settings["schedule"] = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 2}
    manifest = run_dir / "checkpoints/step-00000003/checkpoint.json"
    facts = json.loads(manifest.read_text())
    facts["config"]["schedule"] |= settings["schedule"]
    manifest.write_text(json.dumps(facts))
    assert start(changed(settings, "training.total_steps=12")).step == 3
    with pytest.raises(ValueError, match="training.total_steps: checkpoint: 10, now: 4"):
        start(changed(settings, "training.total_steps=4"))  # its decay begins before step 3
