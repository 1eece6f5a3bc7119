"""The command: refusals in one line before any training, signals, divergence, branches."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.shards import read_manifest
from pretrain.checkpoint import check_config_place, find_start
from pretrain.config import dump_config, load_config
from pretrain.distributed import choose_device
from pretrain.interrupt import Interrupt

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, float]]]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.peek_lr=1", "did you mean optimizer.peak_lr?"),
        ("data.dataset=nowhere", "nowhere is not a data set"),
        ("run_dir=/proc/nowhere", "run_dir cannot be written: got /proc/nowhere"),
        ("batch.batch_tokens=96", "32 * 1 * 2 = 64; use 64 or 128"),
        pytest.param(
            "parallel.device=cuda",
            "parallel.device has no GPU: got cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2_on_all_ranks(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, override: str, words: str
) -> None:
    refused = run_ranks(write_config(settings), override, ranks=2)
    assert refused.exit_codes == [2, 2]
    (line,) = refused.output.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not Path(settings["run_dir"]).exists()


def test_missing_config_is_refused(run_ranks: Any, tmp_path: Path) -> None:
    refused = run_ranks(tmp_path / "none.yaml")
    assert refused.exit_codes == [2]
    assert refused.output.startswith(f"error: no config: got {tmp_path / 'none.yaml'}")


def test_folder_of_something_else_is_not_written_into(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    run_dir = Path(settings["run_dir"])
    run_dir.mkdir()
    (run_dir / "thesis.txt").write_text("mine")
    refused = run_ranks(write_config(settings))
    assert refused.exit_codes == [2]
    assert "run_dir holds files of something else" in refused.output
    assert [path.name for path in run_dir.iterdir()] == ["thesis.txt"]


def test_first_moments_of_a_killed_run_are_no_foreign_files(
    settings: dict[str, Any], write_config: WriteConfig
) -> None:
    run_dir = Path(settings["run_dir"])
    run_dir.mkdir()
    (run_dir / ".lock").touch()
    (run_dir / "config.yaml.123.tmp").write_text("run_dir:")
    (run_dir / "logs").mkdir()  # the launcher's
    config = load_config(write_config(settings))
    assert find_start(config, read_manifest(config.data.dataset)).step == 0


def test_folder_in_which_another_process_trains_is_refused(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    path = write_config(settings)
    config = load_config(path)
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_text("of the run in progress")
    with open(config.run_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = run_ranks(path, ranks=2)
    assert refused.exit_codes == [2, 2]
    assert "run_dir is in use" in refused.output
    assert (config.run_dir / "config.yaml").read_text() == "of the run in progress"


def test_a_config_in_the_run_folder_is_never_overwritten(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    run_dir = Path(settings["run_dir"])
    run_dir.mkdir()
    own = run_dir / "config.yaml"
    own.write_text("# mine\n" + write_config(settings).read_text())
    before = own.read_bytes()
    for path, words in (
        (own, f"error: the run would overwrite the config that it reads: got {own}"),
        (write_config(settings), "error: run_dir holds files of something else"),
    ):
        refused = run_ranks(path)
        assert refused.exit_codes == [2]
        (line,) = refused.output.splitlines()
        assert line.startswith(words)
        assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]
        assert own.read_bytes() == before


def test_the_config_that_a_run_wrote_may_be_read_but_not_changed(
    settings: dict[str, Any], write_config: WriteConfig
) -> None:
    config = load_config(write_config(settings))
    config.run_dir.mkdir()
    own = config.run_dir / "config.yaml"
    own.write_text(dump_config(config))
    check_config_place(load_config(own), own)
    with pytest.raises(ValueError, match="would overwrite the config that it reads"):
        check_config_place(load_config(own, ["seed=9"]), own)


@pytest.mark.parametrize(
    ("number", "code"),
    [(15, 143), *(pytest.param(n, 128 + n, marks=pytest.mark.slow) for n in (2, 10))],
)
def test_signal_saves_and_the_same_command_goes_on(
    settings: dict[str, Any],
    write_config: WriteConfig,
    run_ranks: Any,
    read_log: ReadLog,
    number: int,
    code: int,
) -> None:
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    unbroken = run_dir.with_name("unbroken")
    strike = ("pretrain.engine", "Engine.update", 5, "after")
    stopped = run_ranks(config, strike=strike, signal_number=number)
    assert stopped.exit_codes == [code]
    assert "stopped as asked" in stopped.output
    assert (run_dir / "checkpoints/latest").read_text().strip() == "step-00000006"
    resumed = run_ranks(config)
    assert resumed.exit_codes == [0]
    assert "at step 6" in resumed.output
    assert run_ranks(config, f"run_dir={unbroken}").exit_codes == [0]
    assert read_log(run_dir) == read_log(unbroken)


EVERY_PHASE = [
    ("pretrain.checkpoint", "newest_complete", 1, "after"),  # start-up: nothing done yet
    ("pretrain.train", "initialize", 1, "before"),
    ("pretrain.engine", "Engine.__init__", 1, "after"),
    ("pretrain.engine", "Engine._loss", 2, "after"),  # in the accumulation of update 1
    ("pretrain.train", "read_weights", 1, "after"),  # start-up of a run that resumes
    ("pretrain.data", "collate", 2, "after"),  # in the thread that reads ahead: update 2
    ("pretrain.saver", "write_manifest", 1, "before"),  # in the save of update 3
    ("pretrain.engine", "Engine._loss", 6, "before"),  # in the validation after update 4
    ("pretrain.engine", "Engine._loss", 2, "after"),  # in the validation that this run makes up for
    ("pretrain.engine", "Engine.statistics", 1, "after"),  # update 5
    ("pretrain.saver", "write_shard", 1, "after"),  # in the save of update 6
    ("pretrain.engine", "Engine.update", 2, "after"),
]
ON_RANK_0 = ("newest_complete", "write_manifest")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "background"), [(1, False), (2, True)])
def test_sigterm_in_every_phase_loses_nothing(
    settings: dict[str, Any],
    write_config: WriteConfig,
    run_ranks: Any,
    read_log: ReadLog,
    ranks: int,
    background: bool,
) -> None:
    settings["checkpoint"]["background"] = background
    settings["logging"] = {"statistics_every_steps": 5}
    settings["training"]["total_steps"] = 30
    settings["batch"]["batch_tokens"] = 128 * ranks  # the same number of calls
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    for phase in EVERY_PHASE:
        rank = 0 if phase[1] in ON_RANK_0 else ranks - 1
        stopped = run_ranks(config, ranks=ranks, strike=phase, struck_rank=rank, signal_number=15)
        assert stopped.exit_codes == [143] * ranks, f"{phase}: {stopped.output}"
        assert "stopped" in stopped.output.splitlines()[-1]
    finished = run_ranks(config, ranks=ranks)
    assert finished.exit_codes == [0] * ranks, finished.output
    unbroken = run_dir.with_name("unbroken")
    assert run_ranks(config, f"run_dir={unbroken}", ranks=ranks).exit_codes == [0] * ranks
    assert read_log(run_dir) == read_log(unbroken)
    weights = "checkpoints/step-00000030/model.safetensors"
    assert (run_dir / weights).read_bytes() == (unbroken / weights).read_bytes()


def test_time_limit_saves_and_the_same_command_goes_on(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    config = write_config(settings)
    stopped = run_ranks(config, "training.time_limit_minutes=1e-6", ranks=2)
    assert stopped.exit_codes == [142, 142]
    assert "stopped by training.time_limit_minutes before an update" in stopped.output
    settings["training"]["time_limit_minutes"] = 0.1
    changes = ("training.total_steps=100000", "schedule.kind=constant")
    stopped = run_ranks(write_config(settings), *changes)
    assert stopped.exit_codes == [142]
    last = stopped.output.splitlines()[-1]
    assert last.startswith("stopped as asked by training.time_limit_minutes")
    assert Path(settings["run_dir"], "checkpoints/latest").is_file()


def test_validation_that_a_kill_cut_off_is_made_up_for(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> None:
    settings["checkpoint"]["every_steps"] = 4
    config = write_config(settings)
    # In the validation after update 4; from there, in the one after the last update.
    for count in (4 * 4 + 2, 5 + 4 * 6 + 5 + 2):
        strike = ("pretrain.engine", "Engine._loss", count, "before")
        assert run_ranks(config, strike=strike).exit_codes == [-9]
    finished = run_ranks(config)
    assert finished.exit_codes == [0], finished.output
    run_dir = Path(settings["run_dir"])
    unbroken = run_dir.with_name("unbroken")
    assert run_ranks(config, f"run_dir={unbroken}").exit_codes == [0]
    assert read_log(run_dir) == read_log(unbroken)


def test_wsd_decay_starts_from_a_checkpoint_of_another_run(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> None:
    settings["schedule"] = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 2}
    settings["checkpoint"]["keep_last"] = None
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    assert run_ranks(config).exit_codes == [0]
    branch = run_dir.with_name("branch")
    step = run_dir / "checkpoints/step-00000003"
    changes = (f"run_dir={branch}", f"training.branch_from={step}", "training.total_steps=7")
    decayed = run_ranks(config, *changes, "schedule.decay_steps=4")
    assert decayed.exit_codes == [0], decayed.output
    lines = [line for line in read_log(branch) if "lr" in line]
    assert [line["step"] for line in lines] == [4, 5, 6, 7]
    assert [line["lr"] for line in lines] == pytest.approx([2.325e-3, 1.65e-3, 9.75e-4, 3e-4])
    (same,) = (line for line in read_log(run_dir) if line["step"] == 4 and "loss" in line)
    assert lines[0]["loss"] == same["loss"]
    refused = run_ranks(config, f"run_dir={branch}-2", f"training.branch_from={run_dir}")
    assert refused.exit_codes == [2]
    assert "training.branch_from is no complete checkpoint" in refused.output
    refused = run_ranks(config, f"run_dir={branch}-2", f"training.branch_from={step}", "seed=4")
    assert refused.exit_codes == [2]
    assert f"training.branch_from is of a run with other settings: got {step}" in refused.output


@pytest.mark.slow
def test_a_file_named_stop_saves_and_ends_the_run(
    settings: dict[str, Any], write_config: WriteConfig
) -> None:
    run_dir = Path(settings["run_dir"])
    config = write_config(settings)
    changes = ("training.total_steps=100000", "checkpoint.every_steps=100000")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "pretrain", str(config), *changes]
    run_dir.mkdir()
    (run_dir / ".lock").touch()  # a run that was killed in its first moments
    (run_dir / "stop").touch()  # asked for before the start: does not count
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while not (run_dir / "log.jsonl").is_file() and process.poll() is None:
            time.sleep(0.1)
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 143, output
    assert "stopped as asked by SIGTERM or RUN/stop; start the same command again" in output
    assert (run_dir / "checkpoints" / "latest").is_file()
    assert not (run_dir / "stop").exists()


def test_signal_to_one_rank_stops_all_of_them(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    strike = ("pretrain.engine", "Engine.update", 5, "after")
    stopped = run_ranks(
        write_config(settings), ranks=2, strike=strike, struck_rank=1, signal_number=15
    )
    assert stopped.exit_codes == [143, 143]


def test_signals_cannot_be_caught_outside_the_main_thread_and_need_not_be() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(Interrupt).result().received is None


def test_run_that_diverges_ends_in_one_line_and_saves_nothing_of_it(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    changes = (
        "optimizer.peak_lr=1e30",
        "schedule.warmup_steps=0",
        "checkpoint.every_steps=1",
        "health.max_consecutive_skips=3",
    )
    failed = run_ranks(write_config(settings), *changes, ranks=2)
    assert failed.exit_codes == [1, 1]
    last = failed.output.splitlines()[-1]
    assert last.startswith("error: step ")
    assert "is not finite" in last
    diverged = int(last.split()[2])
    assert "3 updates in a row were skipped" in last
    saved = Path(settings["run_dir"], "checkpoints/latest").read_text().strip()
    assert saved == f"step-{diverged - 3:08d}"


def test_a_rank_that_loses_another_says_so_in_one_line(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    strike = ("pretrain.engine", "Engine.update", 2, "before")
    lost = run_ranks(
        write_config(settings), ranks=2, strike=strike, struck_rank=1, signal_number=signal.SIGABRT
    )
    assert lost.exit_codes == [1, -signal.SIGABRT]
    assert lost.output.splitlines()[-1].startswith("error: rank 0 lost another rank (")
    assert "Traceback" not in lost.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device("auto", local_rank=0) == torch.device("cpu")
