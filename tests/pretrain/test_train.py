"""The command: refusals in one line before any training, signals, divergence, launchers."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.shards import read_manifest
from pretrain.checkpoint import find_start
from pretrain.config import load_config
from pretrain.distributed import choose_device
from pretrain.interrupt import Interrupt

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, float]]]
ROOT = Path(__file__).parents[2]


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
    (run_dir / "config.yaml.123.tmp").write_text("run_dir:")
    config = load_config(write_config(settings))
    assert find_start(config, read_manifest(config.data.dataset)).step == 0


def test_folder_in_which_another_process_trains_is_refused(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any
) -> None:
    path = write_config(settings)
    config = load_config(path)
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").touch()
    with open(config.run_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = run_ranks(path, ranks=2)
    assert refused.exit_codes == [2, 2]
    assert "run_dir is in use" in refused.output


@pytest.mark.parametrize(
    ("number", "code"), [(15, 143), pytest.param(2, 130, marks=pytest.mark.slow)]
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
    (run_dir / "config.yaml").touch()
    (run_dir / "stop").touch()  # asked for before the start: does not count
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while not (run_dir / "log.jsonl").is_file() and process.poll() is None:
            time.sleep(0.1)
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 143, output
    assert "stopped as asked; start the same command again" in output
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device("auto", local_rank=0) == torch.device("cpu")


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_command_trains_alone(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path
) -> None:
    finished = command("-m", "pretrain", write_config(settings))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == f"{settings['run_dir']} is complete: step 10/10"
    assert finished.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29871", "-m"],
        ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "29872",
         "--module"],
    ],
    ids=["torchrun", "deepspeed"],
)  # fmt: skip
def test_launchers_give_the_losses_of_plain_ranks(
    settings: dict[str, Any],
    write_config: WriteConfig,
    run_ranks: Any,
    read_log: ReadLog,
    launcher: list[str],
) -> None:
    config = write_config(settings)
    other = Path(settings["run_dir"]).with_name("other")
    launched = command(*launcher, "pretrain", config)
    assert launched.returncode == 0, launched.stderr
    assert run_ranks(config, f"run_dir={other}", ranks=2).exit_codes == [0, 0]
    assert read_log(Path(settings["run_dir"])) == read_log(other)
