"""A run goes on with any number of ranks at any ZeRO stage, as if nothing had changed."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

WriteConfig = Callable[[dict[str, Any]], Path]
ReadLog = Callable[[Path], list[dict[str, Any]]]

RANKS = (1, 2, 4)
STAGES = (0, 1, 2, 3)
SAVED_STEP, NEXT_STEPS = 3, 5


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in log if "loss" in line]


def rows(log: list[dict[str, Any]]) -> list[str]:
    return [line["rows"] for line in log if "rows" in line]


@pytest.fixture
def check_chain(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> Callable[[list[tuple[int, int]]], None]:
    """Kills a run in steps 5, 8, ... and lets other (ranks, ZeRO stage) go on each time."""

    def check(chain: list[tuple[int, int]]) -> None:
        config = write_config(settings)
        run_dir = Path(settings["run_dir"])
        unbroken = run_dir.with_name("unbroken")
        assert run_ranks(config, f"run_dir={unbroken}").exit_codes == [0]
        *broken, last = chain
        for ranks, stage in broken:
            strike = ("pretrain.engine", "Engine.update", 5, "before")
            killed = run_ranks(config, f"parallel.zero_stage={stage}", ranks=ranks, strike=strike)
            assert killed.exit_codes[0] == -9, killed.output
        ranks, stage = last
        finished = run_ranks(config, f"parallel.zero_stage={stage}", ranks=ranks)
        assert finished.exit_codes == [0] * ranks, finished.output
        log, expected = read_log(run_dir), read_log(unbroken)
        assert rows(log) == rows(expected)
        assert losses(log) == pytest.approx(losses(expected), abs=1e-5)

    return check


def test_ranks_and_stages_change_twice_in_a_run(check_chain: Any) -> None:
    check_chain([(2, 2), (1, 3), (4, 0)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_on_changing_ranks_lose_no_row_and_double_none(
    settings: dict[str, Any], write_config: WriteConfig, run_ranks: Any, read_log: ReadLog
) -> None:
    settings["training"]["total_steps"] = 70  # 14 epochs
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    unbroken = run_dir.with_name("unbroken")
    assert run_ranks(config, f"run_dir={unbroken}").exit_codes == [0]
    random = Random(0)
    for _ in range(10):
        ranks, stage, update = random.choice(RANKS), random.choice(STAGES), random.randint(4, 7)
        strike = ("pretrain.engine", "Engine.update", update, random.choice(["before", "after"]))
        struck = random.randrange(ranks)
        zero = f"parallel.zero_stage={stage}"
        killed = run_ranks(config, zero, ranks=ranks, strike=strike, struck_rank=struck)
        assert killed.exit_codes[struck] == -9, killed.output
    assert run_ranks(config, ranks=2).exit_codes == [0, 0]
    log, expected = read_log(run_dir), read_log(unbroken)
    assert len(rows(log)) == 70
    assert rows(log) == rows(expected)
    assert losses(log) == pytest.approx(losses(expected), rel=1e-3)


# A process that saves or loads at all stages with its number of ranks.
RANK = """
import json, os
os.environ.update(environment)
import io
from pathlib import Path
import torch
from rich.console import Console
from data_prep.shards import read_manifest
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain.checkpoint import find_start
from pretrain.config import load_config
from data_prep.training_rows import TrainingRows
from pretrain.data import training_batches
from pretrain.distributed import start_world
from pretrain.engine import Engine
from pretrain.health import Health
from pretrain.saver import Saver
from pretrain.schedule import learning_rate
from pretrain.state import read_weights

world = start_world()

def updates(config, engine, health, first, count):
    rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
    batches = training_batches(rows, config, world.rank, world.size, first_update=first)
    found = []
    for step in range(first + 1, first + 1 + count):
        lr = learning_rate(step, config.schedule, config.optimizer.peak_lr, 10)
        update = engine.update(next(batches), lr, health)
        health.record(step, update.loss, update.grad_norm, update.verdict)
        found.append(update.loss)
    return found

def start_engine(run, stage):
    config = load_config(path, [f"run_dir={run}", f"parallel.zero_stage={stage}"])
    manifest = read_manifest(config.data.dataset)
    start = find_start(config, manifest)
    model = LanguageModel(config.model)
    if start.folder is None:
        initialize(model, config.seed)
    else:
        read_weights(start.folder, model)
    engine = Engine(model, config, world, torch.device("cpu"))
    if start.folder is not None:
        engine.load(start.folder, start.updates_taken)
    return config, manifest, engine, Health(config.health, start.health), start.step

results = {}
for stage in (0, 1, 2, 3):
    for run in runs[stage]:
        config, manifest, engine, health, first = start_engine(run, stage)
        results[f"{run} at {stage}"] = updates(config, engine, health, first, count)
        if first == 0:
            console = Console(file=io.StringIO())
            config.run_dir.mkdir(exist_ok=True)
            (config.run_dir / "config.yaml").touch()
            saver = Saver(engine, config, manifest, world, console)
            saver.save(count, health)
            saver.finish()
        engine._engine.destroy()
if world.rank == 0:
    Path(output).write_text(json.dumps(results))
world.barrier()
os._exit(0)
"""


def run_matrix(
    free_port: int, config: Path, output: Path, ranks: int, runs: dict[int, list[str]], count: int
) -> dict[str, list[float]]:
    context = multiprocessing.get_context("forkserver")
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
            "OMP_NUM_THREADS": "1",
        }
        variables = {
            "environment": environment,
            "path": str(config),
            "output": str(output),
            "runs": runs,
            "count": count,
        }
        processes.append(context.Process(target=exec, args=(RANK, variables)))
    for process in processes:
        process.start()
    for process in processes:
        process.join(280)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks
    return dict(json.loads(output.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_and_rank_count_goes_on_from_every_other(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path, port: Callable[[], int]
) -> None:
    config, output = write_config(settings), tmp_path / "results.json"
    saved: dict[tuple[int, int], str] = {}
    for ranks in RANKS:
        names = {stage: [str(tmp_path / f"saved-{ranks}-{stage}")] for stage in STAGES}
        run_matrix(port(), config, output, ranks, names, SAVED_STEP)
        saved |= {(ranks, stage): names[stage][0] for stage in STAGES}
    whole = {0: [str(tmp_path / "whole")], 1: [], 2: [], 3: []}
    found = run_matrix(port(), config, output, 1, whole, SAVED_STEP + NEXT_STEPS)
    (unbroken,) = found.values()
    for ranks in RANKS:
        found = run_matrix(
            port(), config, output, ranks, {s: list(saved.values()) for s in STAGES}, NEXT_STEPS
        )
        assert len(found) == len(saved) * len(STAGES)
        for name, continued in found.items():
            assert continued == pytest.approx(unbroken[SAVED_STEP:], abs=1e-5), (name, ranks)
