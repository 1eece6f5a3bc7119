"""Runs killed at every moment go on to the last bit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
