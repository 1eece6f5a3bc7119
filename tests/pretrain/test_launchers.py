"""The command itself: alone, interrupted in its first moments, and under every launcher."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import RunConfig, dump_config

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, float]]]
ROOT = Path(__file__).parents[2]


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("module", ["pretrain", "eval"])
def test_ctrl_c_while_python_imports_ends_quietly(module: str, tmp_path: Path) -> None:
    # In the place of typer, the first of the imports that take long.
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    stopped = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT.parent,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert stopped.returncode == 130
    assert stopped.stderr == ""


def test_command_trains_alone(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path
) -> None:
    finished = command("-m", "pretrain", write_config(settings))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == f"{settings['run_dir']} is complete: step 10/10"
    assert finished.stderr == ""


LAUNCHERS = {
    "alone": "-m pretrain",
    "torchrun": "-m torch.distributed.run --nproc-per-node 2 --master-port PORT -m pretrain",
    "deepspeed": "-m deepspeed.launcher.runner --num_accelerators 2 --master_port PORT --module"
    " pretrain",
    "ray": "-m launch --cpu-workers 2",
}


@pytest.fixture(scope="module")
def log_of_plain_ranks(
    small_run: dict[str, Any],
    run_ranks: Any,
    read_log: ReadLog,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, float]]:
    """Of the small run on two processes."""
    folder = tmp_path_factory.mktemp("plain")
    config = folder / "config.yaml"
    config.write_text(dump_config(RunConfig(**small_run | {"run_dir": folder / "run"})))
    assert run_ranks(config, ranks=2).exit_codes == [0, 0]
    return read_log(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_config_gives_the_losses_of_plain_ranks_however_it_is_launched(
    settings: dict[str, Any],
    write_config: WriteConfig,
    log_of_plain_ranks: list[dict[str, float]],
    read_log: ReadLog,
    port: Callable[[], int],
    launcher: str,
) -> None:
    config = write_config(settings)
    launched = command(*LAUNCHERS[launcher].replace("PORT", str(port())).split(), config)
    assert launched.returncode == 0, launched.stderr
    ours = read_log(Path(settings["run_dir"]))
    if launcher == "alone":  # one rank adds up in another order
        assert [line["step"] for line in ours] == [line["step"] for line in log_of_plain_ranks]
        losses = [line["loss"] for line in log_of_plain_ranks if "loss" in line]
        assert [line["loss"] for line in ours if "loss" in line] == pytest.approx(losses, rel=1e-5)
    else:
        assert ours == log_of_plain_ranks
