"""A small data set, a small run, and processes that train it as a launcher would."""

import copy
import json
import multiprocessing
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_prep.shards import Manifest, ShardWriter, SplitFacts, read_manifest
from pretrain.checkpoint import Start, find_start
from pretrain.config import RunConfig
from pretrain.distributed import World, start_world, stop_world

ROW_TOKENS = 64
VOCAB_SIZE = 64
ROWS = {"train": 10, "validation": 5}

# What runs in every process: the command `python -m pretrain`, with an optional disturbance at the
# n-th call of a function: a signal to itself before or after it, a hang, or a result multiplied.
RANK = """
import importlib, os, runpy, sys, time
os.environ.update(environment)
sys.argv = ["pretrain", *arguments]
sys.stdout = sys.stderr = open(output, "w", buffering=1)
if strike is not None:
    module, path, count, when = strike
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0
    def struck(*args, **kwargs):
        global calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal_number)
        if calls == count and when == "hang":
            time.sleep(1000)
        result = original(*args, **kwargs)
        if calls == count and when == "after":
            os.kill(os.getpid(), signal_number)
        if isinstance(when, dict) and calls in when["calls"]:
            result = tuple(value * when["factor"] for value in result)
        return result
    setattr(owner, name, struck)
if slow_disk:
    fsync = os.fsync
    def slow(descriptor):
        time.sleep(slow_disk)
        fsync(descriptor)
    os.fsync = slow
runpy.run_module("pretrain", run_name="__main__")
"""


@dataclass(frozen=True)
class Finished:
    """How the ranks of a run ended."""

    exit_codes: list[int]
    output: str
    """Of rank 0."""


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """This process as the only rank; one for all modules, since DeepSpeed remembers its groups."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        world = start_world()
        yield world
        stop_world(world)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed documents of very different lengths, so micro-batches have unequal valid tokens."""
    folder = tmp_path_factory.mktemp("dataset")
    write_dataset(folder, seed=0)
    return folder


def write_dataset(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    splits = {}
    for split, rows in ROWS.items():
        writer = ShardWriter(folder / split, row_tokens=ROW_TOKENS, vocab_size=VOCAB_SIZE)
        documents = 0
        for row in range(rows):
            cuts = random.integers(1, ROW_TOKENS, size=6 * (row % 4))
            starts = np.unique(np.concatenate([[0], cuts]))
            noise = random.integers(0, 3, size=ROW_TOKENS)
            tokens = (np.arange(ROW_TOKENS) * (1 + row % 3) + noise) % VOCAB_SIZE
            writer.write(tokens, starts)
            documents += len(starts)
        splits[split] = SplitFacts(
            rows=rows,
            tokens=rows * ROW_TOKENS,
            documents=documents,
            bytes=0,
            dropped_tokens={"tail": 0},
            index_sha256=writer.finish(),
        )
    manifest = Manifest(
        kind="text",
        tokenizer_sha256=None,
        vocab_size=VOCAB_SIZE,
        row_tokens=ROW_TOKENS,
        dtype="uint16",
        splits=splits,
        documents_in=sum(split.documents for split in splits.values()),
        skipped={},
        inputs=[],
        settings={},
        seed=seed,
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())


@pytest.fixture
def settings(small_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The small run in a folder of the test's own; the test may change it."""
    return copy.deepcopy(small_run) | {"run_dir": str(tmp_path / "run")}


@pytest.fixture(scope="session")
def small_run(dataset: Path) -> dict[str, Any]:
    """Ten updates of a two-layer model with both log-linear mixers; two epochs end inside."""
    return {
        "seed": 3,
        "model": {
            "vocab_size": VOCAB_SIZE,
            "d_model": 32,
            "num_layers": 2,
            "mixer": ["log_linear_mamba2", "log_linear_gated_deltanet"],
            "max_seq_len": 64,
            "mlp": {"hidden_size": 32},
            "tie_embeddings": True,
            "mamba2": {"head_size": 32, "state_size": 16},
            "gated_deltanet": {"num_heads": 2, "key_size": 16, "value_size": 16},
        },
        "data": {"dataset": str(dataset), "seq_len": 32},
        "batch": {"batch_tokens": 128, "micro_batch_rows": 1},
        "optimizer": {"peak_lr": 3e-3},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "parallel": {"zero_stage": 0, "device": "cpu"},
        "training": {"total_steps": 10},
        "validation": {"every_steps": 4, "rows": 5},
        "checkpoint": {"every_steps": 3, "background": False},
    }


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes a tree of settings as a YAML file."""

    def write(tree: dict[str, Any]) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """Runs `python -m pretrain ARGUMENTS` on some ranks, as torchrun would.

    The processes are forked from a server that has imported torch and DeepSpeed already; nothing
    else is shared with them. `strike` = (module, function, n, "before" | "after") sends
    `signal_number` to one rank at the n-th call of that function; the others then get SIGKILL
    too if the signal was that. "hang" in place of these makes the rank sleep there, and
    {"calls": [...], "factor": x} multiplies the results of some calls. `kill_after` seconds after
    the first line all ranks get SIGKILL. `slow_disk` seconds are added to every sync.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    context = multiprocessing.get_context("forkserver")
    # What takes seconds to import, and would be imported late in every process.
    late = ["streaming", "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo"]
    context.set_forkserver_preload(["pretrain.train", "deepspeed", *late])
    outputs = tmp_path_factory.mktemp("outputs")

    def run(
        *arguments: str | Path,
        ranks: int = 1,
        strike: tuple[str, str, int, Any] | None = None,
        struck_rank: int = 0,
        signal_number: int = 9,
        kill_after: float | None = None,
        slow_disk: float = 0,
    ) -> Finished:
        port = free_port()
        processes = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            variables = {
                "environment": environment,
                "arguments": [str(argument) for argument in arguments],
                "output": str(outputs / f"rank-{rank}"),
                "strike": strike if rank == struck_rank else None,
                "signal_number": signal_number,
                "slow_disk": slow_disk,
            }
            processes.append(context.Process(target=exec, args=(RANK, variables)))
        for path in outputs.iterdir():
            path.unlink()
        for process in processes:
            process.start()
        if kill_after is not None:
            printed = outputs / "rank-0"
            while processes[0].is_alive() and not (printed.is_file() and printed.read_text()):
                time.sleep(0.02)
            time.sleep(kill_after)  # from the first line on
            for process in processes:
                process.kill()
        if strike is not None:
            processes[struck_rank].join(120)
            if processes[struck_rank].exitcode == -9:
                for process in processes:
                    process.kill()
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert None not in codes, "a rank hangs"
        return Finished([int(code or 0) for code in codes], (outputs / "rank-0").read_text())

    return run


@pytest.fixture
def port() -> Callable[[], int]:
    """Gives a port of this machine that nobody listens on."""
    return free_port


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def read_log() -> Callable[[Path], list[dict[str, float]]]:
    """The lines of a run's log.jsonl without those numbers that tell about the machine."""

    def read(run_dir: Path) -> list[dict[str, float]]:
        machine = re.compile("time|tokens_per_second|memory_bytes|.*seconds.*")
        lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not machine.fullmatch(k)} for line in lines]

    return read


@pytest.fixture(scope="session")
def killed_run(
    small_run: dict[str, Any], run_ranks: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that was killed while it wrote step 6."""
    folder = tmp_path_factory.mktemp("killed")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(small_run | {"run_dir": str(folder / "run")}))
    assert run_ranks(
        config, strike=("pretrain.saver", "write_manifest", 2, "before")
    ).exit_codes == [-9]
    return folder / "run"


@pytest.fixture
def run_dir(killed_run: Path, settings: dict[str, Any]) -> Path:
    """A copy of that run, at the run_dir of `settings`."""
    return Path(shutil.copytree(killed_run, settings["run_dir"]))


@pytest.fixture(scope="session")
def start() -> Callable[[dict[str, Any]], Start]:
    """Where a run of these settings would start."""

    def find(settings: dict[str, Any]) -> Start:
        config = RunConfig.model_validate(settings)
        return find_start(config, read_manifest(config.data.dataset))

    return find
