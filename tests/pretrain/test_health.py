"""Updates that look wrong: skipped by all ranks together, told, limited; and runs that hang."""

import math
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pretrain.errors import TrainingFailed
from pretrain.health import Health, Verdict
from pretrain.sections import HealthConfig
from pretrain.watchdog import Watchdog, _is_compiling

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, Any]]]


def filled(**settings: Any) -> Health:
    """A full window of losses 2 +- 0.1."""
    health = Health(HealthConfig(spike_window=8, **settings))
    for step in range(8):
        loss = 2.0 + (0.1 if step % 2 else -0.1)
        assert health.judge(loss) is Verdict.TAKE
        health.record(step, loss, 1.0, Verdict.TAKE)
    return health


def test_a_spike_is_a_loss_far_above_the_window() -> None:
    health = filled(spike_action="skip", spike_deviations=6)
    assert health.limit == pytest.approx(2.0 + 6 * 0.1)
    assert health.judge(2.59) is Verdict.TAKE
    assert health.judge(2.61) is Verdict.SKIP_SPIKE
    assert health.judge(0.1) is Verdict.TAKE


@pytest.mark.parametrize(("action", "verdict"), [("off", Verdict.TAKE), ("log", Verdict.SPIKE)])
def test_a_spike_may_be_taken(action: str, verdict: Verdict) -> None:
    assert filled(spike_action=action).judge(9.0) is verdict


def test_a_spike_may_stop_the_run() -> None:
    health = filled(spike_action="stop")
    verdict = health.judge(9.0)
    assert verdict.is_skipped
    with pytest.raises(TrainingFailed, match=r"step 8 is a loss spike: got loss 9.*at most 2\.6"):
        health.record(8, 9.0, 1.0, verdict)


def test_skipped_losses_do_not_move_the_window_and_no_spike_is_seen_before_it_is_full() -> None:
    health = filled(spike_action="skip")
    before = health.limit
    health.record(8, 9.0, 1.0, health.judge(9.0))
    assert health.limit == before
    assert Health(HealthConfig()).judge(1e9) is Verdict.TAKE


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_too_many_skips_in_a_row_stop_the_run(loss: float) -> None:
    health = Health(HealthConfig(max_consecutive_skips=3))
    for good in (True, False):
        for step in (1, 2):
            health.record(step, loss, 1.0, health.judge(loss))
        if good:
            health.record(3, 1.0, 1.0, health.judge(1.0))
    with pytest.raises(TrainingFailed, match="step 9 is not finite.* 3 updates in a row"):
        health.record(9, loss, 1.0, health.judge(loss))


def test_state_comes_back_to_the_last_bit() -> None:
    health = filled(spike_action="skip")
    health.record(8, 9.0, 1.0, health.judge(9.0))
    again = Health(health.settings, health.state)
    assert again.state == health.state
    assert again.limit == health.limit


NAN_IN_STEP_7 = {"calls": [13], "factor": math.nan}  # two micro-batches an update and rank


@pytest.mark.parametrize(
    "stage", [0, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 3))]
)
def test_nan_on_one_rank_is_skipped_by_all_and_training_goes_on(
    settings: dict[str, Any],
    write_config: WriteConfig,
    run_ranks: Any,
    read_log: ReadLog,
    stage: int,
) -> None:
    settings["parallel"]["zero_stage"] = stage
    settings["checkpoint"] |= {"every_steps": 1, "keep_last": None}
    strike = ("pretrain.engine", "Engine._loss", 0, NAN_IN_STEP_7)
    settings["validation"]["every_steps"] = None
    run = run_ranks(write_config(settings), ranks=2, strike=strike, struck_rank=1)
    assert run.exit_codes == [0, 0], run.output
    assert "warning: update 7 was skipped: loss or gradient is not finite" in run.output
    run_dir = Path(settings["run_dir"])
    lines = {line["step"]: line for line in read_log(run_dir)}
    assert lines[7]["loss"] is None
    assert len(lines[7]["row_ids"]) == 4
    assert "verdict" not in lines[6]
    assert lines[8]["lr"] < lines[7]["lr"] < lines[6]["lr"]  # the schedule counts the step
    assert all(math.isfinite(lines[step]["loss"]) for step in lines if step != 7)
    folder = run_dir / "checkpoints"
    assert not (folder / "step-00000007").exists()
    before = load_file(folder / "step-00000006/model.safetensors")
    after = load_file(folder / "step-00000008/model.safetensors")
    assert any(not before[name].equal(after[name]) for name in before)
    # The skipped update left no trace: from step 6, the same run without row batch 7.
    manifest = (folder / "step-00000010/checkpoint.json").read_text()
    assert '"updates_taken": 9' in manifest


def test_skipped_update_leaves_parameters_and_moments_as_they_are(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    settings["validation"]["every_steps"] = None
    settings["training"]["total_steps"] = 3
    settings["schedule"] = {"kind": "constant"}
    settings["checkpoint"] |= {"every_steps": 1, "keep_last": None}
    strike = ("pretrain.engine", "Engine._loss", 0, {"calls": [9], "factor": math.nan})
    run = run_ranks(write_config(settings), strike=strike)
    assert run.exit_codes == [0], run.output
    complete = "is complete: step 3/3; 1 of its updates were skipped (verdict in log.jsonl)"
    assert run.output.splitlines()[-1].endswith(complete)
    again = run_ranks(write_config(settings))
    assert again.exit_codes == [0]
    assert "; 1 of its updates were skipped" in again.output
    folder = Path(settings["run_dir"], "checkpoints")
    for name in ("model.safetensors", "engine/rank-00000-of-00001.safetensors"):
        saved = [load_file(folder / f"step-{step:08d}" / name) for step in (2, 3)]
        assert all(saved[0][key].equal(saved[1][key]) for key in saved[0]), name


def test_a_run_without_one_update_that_was_taken_is_not_complete(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    settings["training"]["total_steps"] = 3
    strike = ("pretrain.engine", "Engine._loss", 0, {"calls": range(99), "factor": math.nan})
    run = run_ranks(write_config(settings), strike=strike)
    assert run.exit_codes == [1]
    last = run.output.splitlines()[-1]
    assert "was taken: got 3 skipped ones, the last skipped: loss or gradient is not finite" in last
    assert not (Path(settings["run_dir"]) / "checkpoints").exists()


@pytest.mark.slow
def test_spike_is_skipped_and_a_resumed_run_judges_alike(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> None:
    settings["health"] = {"spike_action": "skip", "spike_window": 8}
    settings["training"]["total_steps"] = 14
    settings["validation"]["every_steps"] = None
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    logs = []
    for name, killed in (("whole", False), ("broken", True)):
        run = f"run_dir={run_dir.with_name(name)}"
        calls = [41, 42, 43, 44]  # all micro-batches of update 11
        if killed:
            strike = ("pretrain.engine", "Engine.update", 11, "before")
            assert run_ranks(config, run, strike=strike).exit_codes == [-9]
            calls = [call - 36 for call in calls]  # goes on from step 9
        spike = ("pretrain.engine", "Engine._loss", 0, {"calls": calls, "factor": 3.0})
        finished = run_ranks(config, run, strike=spike)
        assert finished.exit_codes == [0], finished.output
        assert "update 11 was skipped: its loss is a spike" in finished.output
        logs.append(read_log(run_dir.with_name(name)))
    assert logs[0] == logs[1]


def test_a_hang_on_one_rank_ends_all_with_their_stacks(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    settings["health"] = {"hang_seconds": 4, "compile_seconds": 100}
    strike = ("pretrain.engine", "Engine.update", 5, "hang")
    run = run_ranks(write_config(settings), ranks=2, strike=strike, struck_rank=1)
    assert run.exit_codes == [1, 1]
    assert "error: rank 0 made no progress for" in run.output
    assert "in update 5; expected less (health.hang_seconds)" in run.output
    folder = Path(settings["run_dir"], "stacks")
    stacks = [(folder / f"rank-{rank:05d}.txt").read_text() for rank in (0, 1)]
    assert "struck" in stacks[1]  # where it sleeps
    assert "update" in stacks[0]
    del settings["health"]
    assert run_ranks(write_config(settings), ranks=2).exit_codes == [0, 0]


def test_a_hang_on_a_full_disk_ends_too_and_shows_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: queue.Queue[int] = queue.Queue()

    def end(code: int) -> None:
        ended.put(code)
        threading.Event().wait()  # nothing comes after the end of a process

    monkeypatch.setattr("pretrain.watchdog.os._exit", end)
    (tmp_path / "stacks").touch()  # nothing can be written into it
    limits = HealthConfig(hang_seconds=0.2, compile_seconds=0.2)
    watchdog = Watchdog(tmp_path, rank=0, settings=limits)
    watchdog.progress("update 5")
    assert ended.get(timeout=60) == 1
    watchdog.close()
    printed = capfd.readouterr().err
    assert "test_a_hang_on_a_full_disk" in printed  # the stack
    assert "in update 5; expected less (health.hang_seconds); stacks of all ranks are a" in printed


def test_compiling_is_recognised_by_the_compiler_on_the_stack(tmp_path: Path) -> None:
    import sys

    found = []
    source = "found.append(is_compiling(sys._getframe()))"
    names = {"found": found, "is_compiling": _is_compiling, "sys": sys}
    for file in ("/site-packages/triton/compiler/compiler.py", "/home/model.py"):
        exec(compile(source, file, "exec"), names)
    assert found == [True, False]
