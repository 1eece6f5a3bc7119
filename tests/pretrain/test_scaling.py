"""`bench --gpus` on CPU processes: what is measured, how a trace is read, the table, a real one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pretrain import scaling
from pretrain.errors import Refused, TrainingFailed
from pretrain.scaling import Case, Measurement, Study, checked_study, command, measure
from pretrain.scaling_report import COLUMNS, draw, markdown, rows
from pretrain.trace_times import collective_time

WriteConfig = Callable[[dict[str, Any]], Path]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(settings: dict[str, Any], write_config: WriteConfig) -> Callable[..., Study]:
    """study(**options): of the small run, 128 tokens an update in rows of 32."""

    def make(*overrides: str, **options: Any) -> Study:
        given = {
            "gpus": "",
            "cpu_workers": "1,2",
            "zero_stages": "1,3",
            "launchers": "torchrun,ray",
            "updates": 4,
            "rounds": 1,
            "folder": None,
        }
        return checked_study(write_config(settings), overrides, **{**given, **options})

    return make


def test_weak_and_strong_scaling_meet_at_the_most_ranks(study: Callable[..., Study]) -> None:
    found = study()
    assert [found.batch_tokens(ranks, "weak") for ranks in (1, 2)] == [64, 128]
    assert [found.batch_tokens(ranks, "strong") for ranks in (1, 2)] == [128, 128]
    cases = found.cases()
    assert (
        len(cases) == len(set(cases)) == 2 * 3 * 2
    )  # stages, (1, 64) (1, 128) (2, 128), launchers
    assert [case.launcher for case in cases[:2]] == ["torchrun", "ray"]
    assert found.folder.name == "run-scaling"


def test_the_commands_are_those_of_users(tmp_path: Path) -> None:
    case = Case(launcher="ray", zero_stage=1, ranks=2, batch_tokens=128)
    path = tmp_path / "c.yaml"
    assert command(case, path, on_gpus=True) == ["-m", "launch", str(path), "--gpus-per-node", "2"]
    assert command(case, path, on_gpus=False)[-2:] == ["--cpu-workers", "2"]
    case = Case(launcher="torchrun", zero_stage=1, ranks=2, batch_tokens=128)
    words = command(case, path, on_gpus=True)
    assert words[:4] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert words[-3:] == ["-m", "pretrain", str(path)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_workers": "1,x"}, "--cpu-workers is no list of numbers: got 1,x"),
        ({"cpu_workers": "0"}, "--cpu-workers is no list of numbers: got 0"),
        ({"zero_stages": "4"}, "--zero-stages is no list of numbers: got 4"),
        ({"launchers": "torchrun,mpi"}, "--launchers names none: got torchrun,mpi"),
        ({"cpu_workers": "3"}, "does not split: got 128 for 3 ranks; expected a multiple of 96"),
        ({"gpus": "2"}, "--gpus and --cpu-workers exclude each other: got 2 and 1,2"),
        ({"gpus": "512", "cpu_workers": ""}, "not enough GPUs here: got --gpus 512"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    study: Callable[..., Study], options: dict[str, str], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        study(**options)


def event(name: str, begin: float, end: float, category: str, thread: int = 1) -> dict[str, Any]:
    facts = {"ph": "X", "name": name, "cat": category, "tid": thread}
    return {**facts, "ts": begin, "dur": end - begin}


@pytest.mark.parametrize(
    "events",
    [
        [
            event("ncclDevKernel_AllReduce", 0, 10, "kernel", 7),
            event("ncclDevKernel_ReduceScatter", 5, 20, "kernel", 8),
            event("gemm", 12, 30, "kernel", 9),
            event("aten::mm", 0, 100, "cpu_op"),
            event("ncclDevKernel_AllGather", 40, 50, "kernel", 7),
        ],
        [
            event("gloo:all_reduce", 0, 20, "user_annotation", 7),
            event("aten::copy_", 0, 5, "cpu_op", 7),  # a part of the collective
            event("aten::mm", 12, 16, "cpu_op"),
            event("aten::add", 14, 30, "cpu_op", 2),
            event("c10d::allreduce_", 0, 50, "cpu_op"),  # waits
            event("gloo:all_gather", 40, 50, "user_annotation", 8),
        ],
    ],
    ids=["gpu", "cpu"],
)
def test_collectives_are_counted_once_and_hidden_where_the_rank_computes(
    tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    found = collective_time(trace)
    assert found.seconds == pytest.approx(30e-6)
    assert found.hidden_seconds == pytest.approx(8e-6)


def test_a_rank_that_talks_to_nobody_spends_no_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 9, "cpu_op")]}))
    assert collective_time(trace).seconds == 0


def measured(case: Case) -> Measurement:
    """Two ranks are 1.8 times as fast as one, Ray takes 1 % more than torchrun."""
    speed = (1.0 if case.ranks == 1 else 1.8) * (1.0 if case.launcher == "torchrun" else 0.99)
    tokens = 1000 * speed
    return Measurement(
        case=case,
        seconds=case.batch_tokens / tokens,
        tokens_per_second=tokens,
        memory_bytes=2**30,
        collective_seconds=0.0 if case.ranks == 1 else 0.01,
        hidden_seconds=0.0 if case.ranks == 1 else 0.004,
    )


def test_the_table_says_efficiency_and_what_ray_costs(
    study: Callable[..., Study], tmp_path: Path
) -> None:
    found = study(zero_stages="2")
    numbers = [measured(case) for case in found.cases()]
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows(found, numbers)]
    assert len(table) == 2 * 2 * 2
    assert [row["efficiency"] for row in table] == ["100.0 %", "100.0 %", "90.0 %", "90.0 %"] * 2
    assert [row["of torchrun"] for row in table] == ["100.0 %", "99.0 %"] * 4
    assert table[0]["hidden"] == "-"
    assert table[2]["hidden"] == "40 %"
    assert table[2]["collectives"] == "10.0 ms (14 %)"
    assert markdown(rows(found, numbers)).count("\n") == 10
    draw(found, numbers, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"


def test_what_was_measured_is_not_measured_again(
    study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Case] = []

    def run(of: Study, case: Case) -> Measurement:
        if len(ran) == 5:
            raise TrainingFailed("the machine is gone")
        ran.append(case)
        return measured(case)

    monkeypatch.setattr(scaling, "_run", run)
    with pytest.raises(TrainingFailed):
        measure(study())
    first = list(ran)
    ran.clear()
    monkeypatch.setattr(scaling, "_run", lambda of, case: ran.append(case) or measured(case))
    found = measure(study())
    assert [*first, *ran] == study().cases() == [number.case for number in found]
    ran.clear()
    measure(study())
    assert ran == []
    measure(study("optimizer.peak_lr=0.5"))  # another config, other numbers
    assert ran == study().cases()


def test_a_run_that_fails_is_one_line(
    study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; print('error: out of luck'); print('bye'); sys.exit(3)"
    monkeypatch.setattr(scaling, "command", lambda *_: ["-c", script])
    with pytest.raises(TrainingFailed) as failed:
        measure(study())
    (line,) = str(failed.value).splitlines()
    assert "got exit code 3" in line
    assert "(torchrun, ZeRO-1, 1 ranks, 64 tokens an update): out of luck; " in line
    log = Path(line.rpartition(" is in ")[2])
    assert log.read_text().endswith("bye\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bench_measures_both_launchers_and_a_stopped_one_leaves_no_process(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "pretrain", "bench", str(write_config(settings))]
    argv += ["--cpu-workers", "2", "--zero-stages", "2", "--updates", "2"]
    argv += ["--output", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    stopped = subprocess.Popen(argv, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    log = tmp_path / "out" / "run.log"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(stopped.pid).children(recursive=True)
    assert family
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(120) == 143
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive

    done = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "| " + " | ".join(COLUMNS) + " |"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:-1]]
    assert [row[:3] + row[4:5] for row in table] == [
        [kind, "2", "2", launcher] for kind in ("weak", "strong") for launcher in scaling.LAUNCHERS
    ]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"scaling.json", "scaling.png", "run.yaml", "run.log"}
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())["measurements"]
    assert all(entry["collective_seconds"] > 0 for entry in found)
