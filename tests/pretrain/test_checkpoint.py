"""Where a run starts from: the newest whole checkpoint, and what is passed over."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from models.weights import load_model
from pretrain.config import load_config

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, float]]]


def test_half_written_checkpoint_is_passed_over_and_named(
    settings: dict[str, Any], run_dir: Path, write_config: WriteConfig, run_ranks: Any
) -> None:
    assert (run_dir / "checkpoints/step-00000006/model.safetensors").exists()
    resumed = run_ranks(write_config(settings))
    assert resumed.exit_codes == [0]
    assert "warning: step-00000006 passed over" in resumed.output
    assert "at step 3 from step-00000003" in resumed.output


def test_damaged_newest_checkpoint_is_passed_over_and_named(
    start: Any, settings: dict[str, Any], run_dir: Path
) -> None:
    checkpoints = run_dir / "checkpoints"
    shutil.copytree(checkpoints / "step-00000003", checkpoints / "step-00000009")
    weights = checkpoints / "step-00000009/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = start(settings)
    assert found.step == 3
    assert [note.partition(":")[0] for note in found.notes] == [
        "step-00000009 passed over",
        "step-00000006 passed over",
    ]
    assert "model.safetensors" in found.notes[0]


def test_run_with_damaged_checkpoints_only_is_refused(
    start: Any, settings: dict[str, Any], run_dir: Path
) -> None:
    (run_dir / "checkpoints/step-00000003/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no undamaged checkpoint.*model.safetensors is missing"):
        start(settings)


def test_run_with_half_written_checkpoints_only_starts_again(
    start: Any, settings: dict[str, Any], run_dir: Path
) -> None:
    (run_dir / "checkpoints/step-00000003/checkpoint.json").unlink()
    found = start(settings)
    assert (found.step, found.folder) == (0, None)
    assert len(found.notes) == 2


@pytest.fixture(scope="session")
def finished_run(
    small_run: dict[str, Any], run_ranks: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The config of a run that is complete."""
    folder = tmp_path_factory.mktemp("finished")
    config = folder / "config.yaml"
    changes = {"run_dir": str(folder / "run"), "checkpoint": {"every_steps": 2, "keep_last": 2}}
    config.write_text(yaml.safe_dump(small_run | changes))
    assert run_ranks(config).exit_codes == [0]
    return config


def test_finished_run_says_so_and_writes_nothing(finished_run: Path, run_ranks: Any) -> None:
    run_dir = finished_run.with_name("run")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    again = run_ranks(finished_run, ranks=2)
    assert again.exit_codes == [0, 0]
    assert "is complete: step 10/10" in again.output
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_only_the_last_checkpoints_stay(finished_run: Path) -> None:
    checkpoints = finished_run.with_name("run") / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["latest", "step-00000008", "step-00000010"]
    assert (checkpoints / "latest").read_text().strip() == "step-00000010"


def test_step_folder_is_a_model_directory_without_code(finished_run: Path) -> None:
    run_dir = finished_run.with_name("run")
    assert load_model(run_dir).config == load_config(finished_run).model
    assert not list(run_dir.rglob("*.py"))


@pytest.mark.slow
def test_weights_of_every_zero_stage_are_the_trained_ones(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    config = write_config(settings)
    weights = []
    for stage, ranks in ((0, 1), (3, 2)):
        run_dir = Path(settings["run_dir"]).with_name(f"zero-{stage}")
        arguments = (f"run_dir={run_dir}", f"parallel.zero_stage={stage}", "optimizer.eps=1e-4")
        assert run_ranks(config, *arguments, ranks=ranks).exit_codes == [0] * ranks
        weights.append(load_file(run_dir / "checkpoints/step-00000010/model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


FILES = (
    "checkpoint.json",
    "config.json",
    "model.safetensors",
    "engine/rank-00000-of-00001.safetensors",
)


@pytest.mark.parametrize("harm", ["truncated", "emptied", "removed", "one bit"])
@pytest.mark.parametrize("name", FILES)
def test_every_file_of_a_checkpoint_is_missed(
    start: Any, settings: dict[str, Any], run_dir: Path, name: str, harm: str
) -> None:
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")
    newest = checkpoints / "step-00000009"
    shutil.copytree(checkpoints / "step-00000003", newest)
    names = {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()}
    assert names == set(FILES)
    content = bytearray((newest / name).read_bytes())
    if harm == "removed":
        (newest / name).unlink()
    elif harm == "one bit":
        if name == "checkpoint.json":
            pytest.skip("its own parser decides")
        content[len(content) // 2] ^= 1
        (newest / name).write_bytes(content)
    else:
        (newest / name).write_bytes(content[: len(content) // 2 if harm == "truncated" else 0])
    found = start(settings)
    assert found.folder == checkpoints / "step-00000003"
    (note,) = found.notes
    assert note.startswith("step-00000009 passed over: ")
    assert name in note
    settings["checkpoint"]["use_older"] = False
    if name == "checkpoint.json" and harm == "removed":
        assert start(settings).step == 3  # never completed, so nothing was lost
        return
    with pytest.raises(ValueError, match="newest checkpoint of .* is damaged: .*use_older=true"):
        start(settings)


def test_missing_or_wrong_latest_is_no_matter(
    start: Any, settings: dict[str, Any], run_dir: Path
) -> None:
    for content in (None, b"", b"step-0000"):
        (run_dir / "checkpoints/latest").unlink(missing_ok=True)
        if content is not None:
            (run_dir / "checkpoints/latest").write_bytes(content)
        assert start(settings).step == 3
