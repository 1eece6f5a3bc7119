"""What can be seen of a run: before it starts, while it runs, and two of them side by side."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from kernels.levels import num_levels
from models.accounting import (
    flops_per_token,
    forward_flops_per_token,
    hardware_flops_per_token,
    parameter_count,
)
from pretrain.__main__ import app
from pretrain.compare import compare_runs
from pretrain.config import RunConfig
from pretrain.distributed import World
from pretrain.metrics import Metrics, check_wandb, rows_hash
from pretrain.profiler import Profiler

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, Any]]]
CPU = torch.device("cpu")


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_dry_run_says_what_will_be_and_writes_nothing(
    settings: dict[str, Any], write_config: WriteConfig
) -> None:
    shown = invoke(write_config(settings), "--dry-run", "--ranks=2", "parallel.zero_stage=1")
    assert shown.exit_code == 0, shown.output
    count = parameter_count(RunConfig.model_validate(settings).model)
    for words in (
        f"{count:,} parameters",
        "run of 1,280 tokens = 2.00 epochs",
        "2 x cpu, ZeRO-1",
        "2 x 1 rows an update and rank",
        "AdamW, decay 0.1 ",
        "AdamW, decay 0, recurrence",
        "starts from new parameters; 10 of 10 updates to go",
        f"4 checkpoints of {12 * count / 2**20:.2f} MiB, 2 stay; needs room for",
        "memory of each of 2 GPUs in MiB",
    ):
        assert words in shown.output
    (chosen,) = (line for line in shown.output.splitlines() if line.endswith("<- set"))
    assert chosen.startswith("1 ")
    assert not Path(settings["run_dir"]).exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.dataset=nowhere", "error: nowhere is not a data set"),
        ("batch.batch_tokens=96", "error: batch.batch_tokens does not split evenly: got 96"),
        ("optimizer.peek_lr=1", "did you mean optimizer.peak_lr?"),
        ("checkpoint.allow_changed=[optimizer.clip_nrm]", "did you mean optimizer.clip_norm?"),
        ("profile.steps=11-12", "begins after the last update: got 11-12"),
        ("profile.steps=11", "profile.steps is wrong: got 11; expected FIRST-LAST"),
    ],
)
def test_dry_run_refuses_what_the_run_would(
    settings: dict[str, Any], write_config: WriteConfig, override: str, words: str
) -> None:
    refused = invoke(write_config(settings), override, "--dry-run", "--ranks", "2")
    assert refused.exit_code == 2
    assert words in refused.output


def test_hardware_flops_count_the_blocks_once_more(settings: dict[str, Any]) -> None:
    config = RunConfig.model_validate(settings).model
    model_flops = flops_per_token(config, 64)
    assert hardware_flops_per_token(config, 64, recomputes_blocks=False) == model_flops
    head = 2 * config.d_model * config.vocab_size
    again = forward_flops_per_token(config, 64) - head
    assert hardware_flops_per_token(config, 64, recomputes_blocks=True) == model_flops + again


def log_of(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_compare_names_the_first_difference(tmp_path: Path) -> None:
    steps = [
        {"step": s, "loss": 2.0 / s, "lr": 0.1, "grad_norm": 1.0, "rows": f"{s}", "time": s}
        for s in range(1, 6)
    ]
    a = log_of(tmp_path / "a", steps)
    same = log_of(tmp_path / "same", [line | {"time": 99} for line in steps[2:]])
    equal = compare_runs(a, same)
    assert (equal.steps, equal.first, equal.last, equal.difference) == (3, 3, 5, None)
    other = [dict(line) for line in steps]
    other[3]["loss"] *= 1 + 1e-9
    other[4]["rows"] = "x"
    b = log_of(tmp_path / "b", other)
    found = compare_runs(a, b)
    assert found.difference is not None
    assert (found.difference.step, found.difference.name) == (4, "loss")
    assert found.largest["loss"] == pytest.approx(1e-9, rel=1e-3)
    tolerant = compare_runs(a, b, tolerance=1e-6).difference
    assert tolerant is not None
    assert (tolerant.step, tolerant.name) == (5, "rows")

    assert invoke("compare", a, same).exit_code == 0
    parted = invoke("compare", a, b)
    assert parted.exit_code == 1
    assert "they part at step 4: loss is 0.5 and 0.5000000005" in parted.output
    refused = invoke("compare", a, tmp_path)
    assert refused.exit_code == 2
    assert refused.output.startswith(f"error: no run: got {tmp_path} without log.jsonl")


@pytest.mark.parametrize(("copies", "times"), [(0, "0"), (2, "2")])
def test_compare_misses_a_step_that_is_left_out_or_there_twice(
    tmp_path: Path, copies: int, times: str
) -> None:
    steps = [{"step": s, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "rows": "x"} for s in range(6)]
    a = log_of(tmp_path / "a", steps[:5])
    b = log_of(tmp_path / "b", [*steps[:3], *[steps[3]] * copies, *steps[4:]])
    parted = invoke("compare", a, b)
    assert parted.exit_code == 1
    assert f"they part at step 3: times in the log is 1 and {times}" in parted.output
    assert f"1 more in {b}, with nothing to compare them to" in parted.output


def test_compare_proves_a_resume(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    unbroken = run_dir.with_name("unbroken")
    run_ranks(config, strike=("pretrain.engine", "Engine.update", 5, "before"))
    assert run_ranks(config).exit_codes == [0]
    assert run_ranks(config, f"run_dir={unbroken}").exit_codes == [0]
    compared = invoke("compare", run_dir, unbroken)
    assert compared.exit_code == 0, compared.output
    assert "10 steps in both, 1 to 10" in compared.output
    assert "the runs are equal" in compared.output


def test_statistics_maps_and_a_trace_on_request(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> None:
    settings["logging"] = {
        "statistics_every_steps": 5,
        "histograms": True,
        "lambda_maps": True,
        "every_steps": 5,
    }
    settings["profile"] = {"steps": "2-3"}
    settings["parallel"]["zero_stage"] = 3
    finished = run_ranks(write_config(settings), ranks=2)
    assert finished.exit_codes == [0, 0], finished.output
    run_dir = Path(settings["run_dir"])
    lines = [line for line in read_log(run_dir) if "decay/0/mean" in line]
    assert [line["step"] for line in lines] == [5, 10]
    for layer in (0, 1):
        for level in range(num_levels(32)):
            assert lines[0][f"lambda/{layer}/level_{level:02d}"] == pytest.approx(1.0, abs=0.2)
            assert lines[0][f"lambda_deviation/{layer}/level_{level:02d}"] >= 0
        assert 0 < lines[0][f"decay/{layer}/mean"] < 1
        assert lines[0][f"decay/{layer}/half_life"] > 0
    curves = EventAccumulator(str(run_dir / "tensorboard"))
    curves.Reload()
    assert set(curves.Tags()["images"]) == {"lambda_map/0", "lambda_map/1"}
    names = {f"histograms/{kind}/{layer}" for kind in ("lambda", "decay") for layer in (0, 1)}
    assert set(curves.Tags()["histograms"]) == names
    assert [event.step for event in curves.Scalars("lambda/0/level_01")] == [5, 10]
    trace = json.loads((run_dir / "profile/steps-2-3.json").read_text())
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])


def test_a_trace_ends_where_the_run_does(settings: dict[str, Any]) -> None:
    settings["profile"] = {"steps": "1-500"}
    config = RunConfig.model_validate(settings)
    profiler = Profiler(config, 0, CPU)
    for step in (1, 2):
        profiler.step_begins(step)
        torch.ones(2, 2) @ torch.ones(2, 2)
        profiler.step_ends(step)
    assert not (config.run_dir / "profile").exists()
    profiler.close(2)
    trace = json.loads((config.run_dir / "profile/steps-1-2.json").read_text())
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])


def test_a_trace_begins_where_a_run_goes_on(settings: dict[str, Any]) -> None:
    settings["profile"] = {"steps": "2-4"}
    config = RunConfig.model_validate(settings)
    profiler = Profiler(config, 0, CPU)
    for step in (3, 4, 5):
        profiler.step_begins(step)
        profiler.step_ends(step)
    assert [path.name for path in (config.run_dir / "profile").iterdir()] == ["steps-3-4.json"]


def test_wandb_gets_the_scalars_under_one_identity(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, logged = [], []

    def init(**arguments: Any) -> Any:
        begun.append(arguments)
        return SimpleNamespace(
            log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: None
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    settings["logging"] = {"wandb_project": "thesis"}
    config = RunConfig.model_validate(settings)
    config.run_dir.mkdir()
    for resumed in (0, 3):
        metrics = Metrics(config, 1, CPU, resumed, Console(quiet=True))
        metrics.validation_ends(4, 1.5, 1.0)
        metrics.close()
    assert [b["project"] for b in begun] == ["thesis", "thesis"]
    assert begun[0]["id"] == begun[1]["id"]
    assert begun[0]["resume"] == "allow"
    assert logged == [(4, {"validation/validation_loss": 1.5})] * 2


def test_wandb_that_is_not_there_is_refused_before_the_folder_is_made(
    settings: dict[str, Any],
    write_config: WriteConfig,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings["logging"] = {"wandb_project": "thesis"}
    with pytest.raises(ValueError, match="logging.wandb_project needs wandb: got thesis"):
        check_wandb(RunConfig.model_validate(settings))
    refused = invoke(write_config(settings))
    assert refused.exit_code == 2
    assert "logging.wandb_project needs wandb: got thesis" in refused.output
    assert not Path(settings["run_dir"]).exists()


def test_rows_hash_tells_order_and_rows_apart() -> None:
    assert len({rows_hash(rows) for rows in ([1, 2], [2, 1], [1, 2, 3], [258])}) == 4


@pytest.mark.slow
def test_bench_times_both_loops(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    config = write_config(settings)
    left = set(Path(tempfile.gettempdir()).glob("bench-*"))
    measured = run_ranks("bench-loop", config, "--updates", "4", "--rounds", "2", ranks=2)
    assert measured.exit_codes == [0, 0], measured.output
    *_, ours, bare, overhead = measured.output.splitlines()
    assert ours.startswith("ours  median ms of an update (of CPU time), by round: ")
    assert bare.startswith("bare")
    assert overhead.endswith("% of CPU time")
    assert set(Path(tempfile.gettempdir()).glob("bench-*")) <= left
    assert not Path(settings["run_dir"]).exists()
