"""python -m pretrain bench CONFIG --gpus 1,2: how a run scales, under torchrun and Ray.

Strong scaling keeps the config's global batch; weak scaling keeps the work of a GPU, which is that
of the largest number of GPUs, so that the two meet there. Every measurement is a run of the command
that users type, in a folder that is removed when it has been read: updates are timed from one line
of log.jsonl to the next, and one more update is traced for the time in collectives.
"""

import json
import math
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import typer

from models.checkpoint_directory import write_atomically
from pretrain.config import RunConfig, checked_manifest, dump_config, load_config
from pretrain.errors import Refused, TrainingFailed
from pretrain.loop_overhead import WARMUP, bench_config
from pretrain.metrics import LOG_NAME
from pretrain.profiler import PROFILE_FOLDER
from pretrain.trace_times import collective_time

ROOT = Path(__file__).resolve().parent.parent
Launcher = Literal["torchrun", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "ray")
RESULTS_NAME = "scaling.json"
STOP_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to measure; `batch_tokens` is the global batch."""

    launcher: Launcher
    zero_stage: int
    ranks: int
    batch_tokens: int

    def describe(self) -> str:
        return (
            f"{self.launcher}, ZeRO-{self.zero_stage}, {self.ranks} ranks, {self.batch_tokens} "
            "tokens an update"
        )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a case gave; times and memory are those of rank 0."""

    case: Case
    seconds: float
    """Of an update, median of the quickest round."""
    tokens_per_second: float
    """Of all ranks together."""
    memory_bytes: int
    """Peak: allocated on the GPU, or of the process where there is none."""
    collective_seconds: float
    """Of the traced update."""
    hidden_seconds: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is measured, and where the results go."""

    config: RunConfig
    ranks: tuple[int, ...]
    on_gpus: bool
    zero_stages: tuple[int, ...]
    launchers: tuple[Launcher, ...]
    updates: int
    rounds: int
    folder: Path

    def batch_tokens(self, ranks: int, kind: str) -> int:
        """Tokens of an update of all ranks, under `kind` of scaling: weak or strong."""
        full = self.config.batch.batch_tokens
        return full if kind == "strong" else full * ranks // max(self.ranks)

    def cases(self) -> list[Case]:
        """Each once; launchers next to each other, so that what the machine does falls on both."""
        found = [
            Case(
                launcher=launcher,
                zero_stage=stage,
                ranks=ranks,
                batch_tokens=self.batch_tokens(ranks, kind),
            )
            for stage in self.zero_stages
            for ranks in self.ranks
            for kind in ("weak", "strong")
            for launcher in self.launchers
        ]
        return list(dict.fromkeys(found))


def checked_study(
    config_path: Path,
    overrides: Sequence[str],
    *,
    gpus: str,
    cpu_workers: str,
    zero_stages: str,
    launchers: str,
    updates: int,
    rounds: int,
    folder: Path | None,
) -> Study:
    """The study that the options mean.

    Raises:
        Refused: they cannot be measured, or not with this config.
    """
    try:
        if gpus and cpu_workers:
            raise ValueError(
                f"--gpus and --cpu-workers exclude each other: got {gpus} and {cpu_workers}; "
                "expected one"
            )
        config = load_config(config_path, overrides)
        option, text = ("--gpus", gpus) if gpus else ("--cpu-workers", cpu_workers)
        ranks = _numbers(option, text, range(1, 1 << 16))
        stages = _numbers("--zero-stages", zero_stages, range(4))
        names = tuple(dict.fromkeys(name.strip() for name in launchers.split(",")))
        if not set(names) <= set(LAUNCHERS):
            raise ValueError(
                f"--launchers names none: got {launchers}; expected some of {','.join(LAUNCHERS)}"
            )
        if gpus and max(ranks) > torch.cuda.device_count():
            raise ValueError(
                f"not enough GPUs here: got --gpus {gpus}; expected at most "
                f"{torch.cuda.device_count()}; use --cpu-workers on a machine without"
            )
        study = Study(
            config=config,
            ranks=ranks,
            on_gpus=bool(gpus),
            zero_stages=stages,
            launchers=tuple(name for name in LAUNCHERS if name in names),
            updates=updates,
            rounds=rounds,
            folder=folder or config.run_dir.with_name(f"{config.run_dir.name}-scaling"),
        )
        _check_batches(study)
        checked_manifest(config, max(ranks))
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from None
    return study


def _numbers(option: str, text: str, allowed: range) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) in allowed for part in parts):
        raise ValueError(
            f"{option} is no list of numbers: got {text}; expected numbers from {allowed[0]} to "
            f"{allowed[-1]}, as in 1,2"
        )
    return tuple(sorted(set(map(int, parts))))


def _check_batches(study: Study) -> None:
    config = study.config
    step = config.data.seq_len * config.batch.micro_batch_rows * math.lcm(*study.ranks)
    if config.batch.batch_tokens % step:
        raise ValueError(
            f"batch.batch_tokens does not split: got {config.batch.batch_tokens} for "
            f"{','.join(map(str, study.ranks))} ranks; expected a multiple of {step}; change it"
        )


def measure(study: Study) -> list[Measurement]:
    """Measures what the folder does not hold yet; it holds all results afterwards.

    Raises:
        TrainingFailed: a run ended with an error. What was measured before it stays.
    """
    results = study.folder / RESULTS_NAME
    facts = _facts(study)
    done = _earlier(results, facts)
    cases = study.cases()
    study.folder.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases, start=1):
        if case not in done:
            typer.echo(f"[{number}/{len(cases)}] {case.describe()}", err=True)
            rounds = [_run(study, case) for _ in range(study.rounds)]
            done[case] = min(rounds, key=lambda measured: measured.seconds)
            content = {**facts, "measurements": [asdict(found) for found in done.values()]}
            write_atomically(results, json.dumps(content, indent=1).encode())
    return [done[case] for case in cases]


def _facts(study: Study) -> dict[str, object]:
    """What decides the numbers, beside the case."""
    first = torch.cuda.get_device_name(0) if study.on_gpus else f"CPU, {os.cpu_count()} cores"
    return {
        "config": json.loads(study.config.model_dump_json()),
        "device": first,
        "torch": torch.__version__,
        "updates": study.updates,
        "rounds": study.rounds,
    }


def _earlier(results: Path, facts: dict[str, object]) -> dict[Case, Measurement]:
    """What an earlier command measured of the same: none where anything differs."""
    try:
        content = json.loads(results.read_bytes())
        if any(content[name] != value for name, value in facts.items()):
            return {}
        found = [{**entry, "case": Case(**entry["case"])} for entry in content["measurements"]]
        return {entry["case"]: Measurement(**entry) for entry in found}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _run(study: Study, case: Case) -> Measurement:
    """One run, from its command to its numbers."""
    run_dir = study.folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    traced = WARMUP + study.updates + 1
    tree = bench_config(study.config, run_dir, traced).model_dump(mode="json")
    tree["parallel"]["zero_stage"] = case.zero_stage
    tree["batch"]["batch_tokens"] = case.batch_tokens
    tree["profile"]["steps"] = f"{traced}-{traced}"
    if not study.on_gpus:
        tree["parallel"]["device"] = "cpu"
    path = study.folder / "run.yaml"
    path.write_text(dump_config(RunConfig.model_validate(tree)))
    environment = dict(os.environ)
    if not study.on_gpus:  # a rank has the same processors whatever the number of ranks
        threads = max(1, (os.cpu_count() or 1) // max(study.ranks))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    argv = command(case, path, study.on_gpus)
    _start(argv, study.folder / "run.log", case, environment)
    lines = [json.loads(line) for line in (run_dir / LOG_NAME).read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    times = [line["time"] for line in lines[WARMUP - 1 : -1]]
    seconds = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
    talk = collective_time(run_dir / PROFILE_FOLDER / f"steps-{traced}-{traced}.json")
    shutil.rmtree(run_dir)
    return Measurement(
        case=case,
        seconds=seconds,
        tokens_per_second=case.batch_tokens / seconds,
        memory_bytes=max(line["memory_bytes"] for line in lines[:-1]),
        collective_seconds=talk.seconds,
        hidden_seconds=talk.hidden_seconds,
    )


def command(case: Case, config: Path, on_gpus: bool) -> list[str]:
    """The command of a case, without the interpreter."""
    if case.launcher == "ray":
        option = "--gpus-per-node" if on_gpus else "--cpu-workers"
        return ["-m", "launch", str(config), option, str(case.ranks)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks)]
    return [*torchrun, "--master-port", str(_free_port()), "-m", "pretrain", str(config)]


def _start(argv: Sequence[str], log: Path, case: Case, environment: Mapping[str, str]) -> None:
    """Runs a command to its end; its output goes to `log`. TrainingFailed where that is no 0."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait()
        except BaseException:  # whatever ends us ends the run first
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            process.kill()
            raise
    if code:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if "error: " in line]
        last = (errors or said or ["nothing"])[-1].split("error: ")[-1]
        raise TrainingFailed(
            f"a measured run failed: got exit code {code} from python {shlex.join(argv)} "
            f"({case.describe()}): {last}; all of its output is in {log}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
