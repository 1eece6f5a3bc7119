"""Checkpoints: resume to the last bit, kills at every moment of a save, refusals, retention."""

import io
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from data_prep.shards import read_manifest
from models.checkpoint_directory import verify
from models.language_model import LanguageModel
from models.weights import load_model, save_model
from pretrain.checkpoint import Start, find_start
from pretrain.config import RunConfig, load_config
from pretrain.distributed import World
from pretrain.errors import TrainingFailed
from pretrain.health import Health
from pretrain.saver import Saver, remove_old
from pretrain.sections import HealthConfig

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, float]]]

Moment = tuple[str, str, int, str]  # module, function, n-th call in the process, before or after it

IN_UPDATE_5: Moment = ("pretrain.engine", "Engine.update", 5, "before")
IN_SECOND_SAVE: Moment = ("pretrain.saver", "write_manifest", 2, "before")
# One run that saves at 3, 6, 9 and 10 is killed at all of these, one after the other.
EVERY_MOMENT: list[Moment] = [
    ("pretrain.engine", "Engine.update", 1, "after"),  # nothing saved yet
    IN_UPDATE_5,  # at step 5, saved at 3
    ("pretrain.engine", "Engine.validation_loss", 1, "after"),  # at step 4
    ("pretrain.engine", "Engine.snapshot", 1, "before"),  # the save of step 6, from its start
    ("pretrain.saver", "write_shard", 1, "before"),
    ("pretrain.saver", "write_shard", 1, "after"),
    ("pretrain.saver", "save_model", 1, "before"),
    ("pretrain.saver", "save_model", 1, "after"),
    ("pretrain.saver", "write_manifest", 1, "before"),
    ("pretrain.saver", "write_manifest", 1, "after"),  # saved at 6, `latest` still says 3
    ("pretrain.saver", "write_atomically", 1, "after"),  # saved at 9, nothing removed yet
    ("shutil", "rmtree", 2, "before"),  # saved at 10, killed while 9 is removed
]


@pytest.fixture
def check_kills(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> Callable[..., None]:
    """Kills a run at each of some moments, lets it finish, compares it with an unbroken one."""

    def check(stage: int, ranks: int, moments: list[Moment], struck_rank: int = 0) -> None:
        settings["parallel"]["zero_stage"] = stage
        settings["checkpoint"]["keep_last"] = 1
        config = write_config(settings)
        run_dir = Path(settings["run_dir"])
        for moment in moments:
            broken = run_ranks(config, ranks=ranks, strike=moment, struck_rank=struck_rank)
            assert broken.exit_codes[struck_rank] == -9, f"{moment}: {broken.output}"
        finished = run_ranks(config, ranks=ranks)
        assert finished.exit_codes == [0] * ranks, finished.output
        unbroken = run_dir.with_name("unbroken")
        assert run_ranks(config, f"run_dir={unbroken}", ranks=ranks).exit_codes == [0] * ranks
        assert len(read_log(unbroken)) == 10 + 3
        assert read_log(run_dir) == read_log(unbroken)
        weights = "checkpoints/step-00000010/model.safetensors"
        assert (run_dir / weights).read_bytes() == (unbroken / weights).read_bytes()

    return check


def test_killed_run_gives_the_same_losses_to_the_last_bit(check_kills: Any) -> None:
    check_kills(stage=2, ranks=2, moments=[IN_SECOND_SAVE])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks", "moments"),
    [
        (0, 1, EVERY_MOMENT),
        (0, 2, [IN_UPDATE_5]),
        (1, 1, [IN_SECOND_SAVE]),
        (1, 2, [IN_UPDATE_5]),
        (2, 1, [IN_UPDATE_5]),
        (2, 2, EVERY_MOMENT),
        (3, 1, [IN_UPDATE_5]),
        (3, 2, EVERY_MOMENT),
    ],
    ids=lambda value: f"{len(value)}-kills" if isinstance(value, list) else str(value),
)
def test_run_killed_at_any_moment_gives_the_same_losses_to_the_last_bit(
    check_kills: Any, stage: int, ranks: int, moments: list[Moment]
) -> None:
    check_kills(stage, ranks, moments)


@pytest.mark.slow
def test_run_whose_second_rank_is_killed_gives_the_same_losses(check_kills: Any) -> None:
    save = ("pretrain.saver", "write_shard", 1, "before")
    check_kills(stage=2, ranks=2, moments=[IN_UPDATE_5, save], struck_rank=1)


@pytest.fixture(scope="session")
def killed_run(
    small_run: dict[str, Any], run_ranks: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that was killed while it wrote step 6."""
    folder = tmp_path_factory.mktemp("killed")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(small_run | {"run_dir": str(folder / "run")}))
    assert run_ranks(config, strike=IN_SECOND_SAVE).exit_codes == [-9]
    return folder / "run"


@pytest.fixture
def run_dir(killed_run: Path, settings: dict[str, Any]) -> Path:
    """A copy of that run, at the run_dir of `settings`."""
    return Path(shutil.copytree(killed_run, settings["run_dir"]))


def start(settings: dict[str, Any]) -> Start:
    config = RunConfig.model_validate(settings)
    return find_start(config, read_manifest(config.data.dataset))


def changed(settings: dict[str, Any], override: str) -> dict[str, Any]:
    """`settings` after one section.key=value."""
    path, _, value = override.partition("=")
    *sections, key = path.split(".")
    tree = settings
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = yaml.safe_load(value)
    return settings


def test_half_written_checkpoint_is_passed_over_and_named(
    settings: dict[str, Any], run_dir: Path, write_config: WriteConfig, run_ranks: Any
) -> None:
    assert (run_dir / "checkpoints/step-00000006/model.safetensors").exists()
    resumed = run_ranks(write_config(settings))
    assert resumed.exit_codes == [0]
    assert "warning: step-00000006 passed over" in resumed.output
    assert "at step 3 from step-00000003" in resumed.output


def test_damaged_newest_checkpoint_is_passed_over_and_named(
    settings: dict[str, Any], run_dir: Path
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
    settings: dict[str, Any], run_dir: Path
) -> None:
    (run_dir / "checkpoints/step-00000003/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no undamaged checkpoint.*model.safetensors is missing"):
        start(settings)


def test_run_with_half_written_checkpoints_only_starts_again(
    settings: dict[str, Any], run_dir: Path
) -> None:
    (run_dir / "checkpoints/step-00000003/checkpoint.json").unlink()
    found = start(settings)
    assert (found.step, found.folder) == (0, None)
    assert len(found.notes) == 2


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
    settings: dict[str, Any], run_dir: Path, override: str, message: str
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
    settings: dict[str, Any], run_dir: Path, override: str
) -> None:
    found = start(changed(settings, override))
    assert found.folder == run_dir / "checkpoints/step-00000003"


def test_what_may_change_is_named_and_accepted_when_allowed(
    settings: dict[str, Any], run_dir: Path
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
    settings: dict[str, Any], run_dir: Path
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
    settings: dict[str, Any], run_dir: Path, tmp_path: Path
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
    settings: dict[str, Any], run_dir: Path
) -> None:
    settings["schedule"] = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 2}
    manifest = run_dir / "checkpoints/step-00000003/checkpoint.json"
    facts = json.loads(manifest.read_text())
    facts["config"]["schedule"] |= settings["schedule"]
    manifest.write_text(json.dumps(facts))
    assert start(changed(settings, "training.total_steps=12")).step == 3
    with pytest.raises(ValueError, match="training.total_steps: checkpoint: 10, now: 4"):
        start(changed(settings, "training.total_steps=4"))  # its decay begins before step 3


@pytest.mark.slow
def test_longer_run_of_equal_learning_rates_goes_on(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> None:
    settings["schedule"] = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 2}
    config = write_config(settings)
    longer = Path(settings["run_dir"]).with_name("longer")
    assert run_ranks(config, "training.total_steps=10", strike=IN_SECOND_SAVE).exit_codes == [-9]
    assert run_ranks(config, "training.total_steps=12").exit_codes == [0]
    assert run_ranks(config, "training.total_steps=12", f"run_dir={longer}").exit_codes == [0]
    assert read_log(Path(settings["run_dir"])) == read_log(longer)


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
    assert not (run_dir / "checkpoints/latest").exists()
    assert output.getvalue() == ""


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


FILES = (
    "checkpoint.json",
    "config.json",
    "model.safetensors",
    "engine/rank-00000-of-00001.safetensors",
)


@pytest.mark.parametrize("harm", ["truncated", "emptied", "removed", "one bit"])
@pytest.mark.parametrize("name", FILES)
def test_every_file_of_a_checkpoint_is_missed(
    settings: dict[str, Any], run_dir: Path, name: str, harm: str
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


def test_missing_or_wrong_latest_is_no_matter(settings: dict[str, Any], run_dir: Path) -> None:
    for content in (None, b"", b"step-0000"):
        (run_dir / "checkpoints/latest").unlink(missing_ok=True)
        if content is not None:
            (run_dir / "checkpoints/latest").write_bytes(content)
        assert start(settings).step == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_on_a_slow_disk_change_nothing(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> None:
    settings["parallel"]["zero_stage"] = 1
    settings["checkpoint"] |= {"every_steps": 2, "background": True}
    settings["training"]["total_steps"] = 40
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    random = np.random.default_rng(0)
    kills = 0
    while kills < 20:
        # Every sync takes 50 ms, so most of the time a save is under way.
        seconds = float(random.uniform(0.05, 1.5))
        broken = run_ranks(config, ranks=2, kill_after=seconds, slow_disk=0.05)
        if broken.exit_codes == [0, 0]:
            shutil.rmtree(run_dir)  # complete: once more from the start
            continue
        kills += 1
    finished = run_ranks(config, ranks=2)
    assert finished.exit_codes == [0, 0], finished.output
    unbroken = run_dir.with_name("unbroken")
    assert run_ranks(config, f"run_dir={unbroken}", ranks=2).exit_codes == [0, 0]
    assert read_log(run_dir) == read_log(unbroken)
    weights = "checkpoints/step-00000040/model.safetensors"
    assert (run_dir / weights).read_bytes() == (unbroken / weights).read_bytes()


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
