"""Writing checkpoints: in the background, on a full disk, which of them stay."""

import io
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from data_prep.shards import read_manifest
from models.checkpoint_directory import verify
from models.language_model import LanguageModel
from models.weights import save_model
from pretrain.config import RunConfig, load_config
from pretrain.distributed import World
from pretrain.errors import TrainingFailed
from pretrain.health import Health
from pretrain.saver import Saver, remove_old
from pretrain.sections import HealthConfig

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, float]]]


class FakeEngine:
    """An engine of one parameter, which changes when it likes."""

    updates_taken = 3

    def __init__(self, config: RunConfig) -> None:
        with torch.device("meta"):
            model = LanguageModel(config.model)
        self.weights = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {"exp_avg/embedding.weight@0": torch.zeros(4)}

    def full_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.weights.items()}


@pytest.fixture
def saver_of(
    settings: dict[str, Any], write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """(Saver of a fake engine, the engine, its console's output)"""

    def make(**checkpoint: Any) -> Any:
        settings["checkpoint"] |= checkpoint
        config = load_config(write_config(settings))
        config.run_dir.mkdir(exist_ok=True)
        world = World(rank=0, size=1, local_rank=0, owns_group=False)
        monkeypatch.setattr(World, "gather", lambda _, value: [value])
        engine, output = FakeEngine(config), io.StringIO()
        manifest = read_manifest(config.data.dataset)
        saver = Saver(engine, config, manifest, world, Console(file=output, width=500))  # type: ignore[arg-type]
        return saver, engine, output

    return make


@pytest.mark.parametrize(
    ("error", "free", "reason"),
    [
        (RuntimeError("[enforce fail] unexpected pos 1 vs 2"), 0, "no space left on device"),
        (OSError(28, "No space left on device"), 1 << 30, "No space left on device"),
        (RuntimeError("odd\nlines"), 1 << 30, "odd; the newest"),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_cannot_be_written_is_one_line(
    saver_of: Any,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    free: int,
    reason: str,
    background: bool,
) -> None:
    saver, _, output = saver_of(background=background)
    run_dir = Path(settings["run_dir"])
    usage = shutil.disk_usage(run_dir)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("pretrain.saver.write_shard", fail)

    def save() -> None:
        saver.save(3, Health(HealthConfig()))
        while not saver.votes()[2]:
            time.sleep(0.01)
        saver.heed(saver.votes())

    with pytest.raises(TrainingFailed, match="cannot write checkpoint .*step-00000003") as failed:
        save()
    assert reason in str(failed.value)
    assert "\n" not in str(failed.value)
    saver.finish()  # nothing is left to be done
    assert not list((run_dir / "checkpoints").iterdir())  # what fills the disk is gone
    assert output.getvalue() == ""


def test_a_checkpoint_stays_where_only_an_older_one_cannot_be_removed(
    saver_of: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, _, _ = saver_of(background=False)

    def fail(*_: Any) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr("pretrain.saver.remove_old", fail)
    with pytest.raises(TrainingFailed, match="Permission denied"):
        saver.save(3, Health(HealthConfig()))
    assert verify(Path(settings["run_dir"], "checkpoints/step-00000003")) == []


def test_what_is_saved_in_the_background_is_what_was_there_when_it_began(
    saver_of: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, engine, output = saver_of(background=True, keep_last=None)
    run_dir = Path(settings["run_dir"])
    let_go = threading.Event()
    write = save_model

    def slow(*args: Any, **kwargs: Any) -> None:
        assert let_go.wait(60)
        write(*args, **kwargs)

    monkeypatch.setattr("pretrain.saver.save_model", slow)
    for step in (1, 2, 3):
        for tensor in engine.weights.values():
            tensor.fill_(step)
        saver.save(step, Health(HealthConfig()))
        for tensor in engine.weights.values():
            tensor.fill_(-1)  # training goes on
        assert saver.votes() == [0.0, 0.0, 0.0]
        saver.heed(saver.votes())
        assert not (run_dir / f"checkpoints/step-{step:08d}/checkpoint.json").exists()
        let_go.set()
        while not saver.votes()[1]:  # written, then published, by votes alone
            saver.heed(saver.votes())
            time.sleep(0.01)
        saver.heed(saver.votes())
        let_go.clear()
        assert (run_dir / "checkpoints/latest").read_text() == f"step-{step:08d}\n"
        assert f"step-{step:08d}" in output.getvalue()
    for step in (1, 2, 3):
        folder = run_dir / f"checkpoints/step-{step:08d}"
        assert verify(folder) == []
        for tensor in load_file(folder / "model.safetensors").values():
            assert tensor.eq(step).all()


def test_a_second_save_waits_for_the_first(saver_of: Any, settings: dict[str, Any]) -> None:
    saver, _, _ = saver_of(background=True, keep_last=None)
    for step in (1, 2):
        saver.save(step, Health(HealthConfig()))
    saver.finish()
    for step in (1, 2):
        assert verify(Path(settings["run_dir"]) / f"checkpoints/step-{step:08d}") == []


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every_steps": 2}, [2, 4, 6]),
        ({"keep_last": 2, "keep_every_steps": 4}, [4, 5, 6]),
        ({"keep_last": None}, [1, 2, 4, 5, 6]),
    ],
)
def test_retention(
    settings: dict[str, Any], keep: dict[str, Any], left: list[int], tmp_path: Path
) -> None:
    settings["checkpoint"] |= keep
    config = RunConfig.model_validate(settings)
    for step in (1, 2, 3, 4, 5, 6, 7):
        folder = config.run_dir / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "part").touch()
        if step not in (3, 7):  # 3 was never completed, 7 is being written
            (folder / "checkpoint.json").touch()
    remove_old(config, config.run_dir / "checkpoints/step-00000006")
    found = sorted(int(path.name[5:]) for path in (config.run_dir / "checkpoints").iterdir())
    assert found == [*left, 7]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_ends_the_run_in_one_line_and_room_lets_it_go_on(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    try:
        config = write_config({**settings, "run_dir": str(disk / "run")})
        full = run_ranks(config)
        assert full.exit_codes == [1]
        assert full.output.splitlines()[-1].startswith("error: cannot write checkpoint")
        assert "Traceback" not in full.output
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert run_ranks(config).exit_codes == [0]
        assert (disk / "run/checkpoints/latest").read_text().strip() == "step-00000010"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_measurement_saves_nothing_after_its_last_update(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    settings["checkpoint"] |= {"every_steps": 4, "after_last": False}
    settings["training"]["total_steps"] = 6
    done = run_ranks(write_config(settings))
    assert done.exit_codes == [0], done.output
    saved = Path(settings["run_dir"]) / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step-00000004"]
