"""`python -m pretrain bench`: models side by side against length, and the longest that trains.

One process for each model, and one for each try at a longest length, so that no memory and no
failure of one touches another. Everything is one JSON object, written after each measurement;
table and plot are made from it.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from models.config import MAX_SEQ_LEN
from pretrain.config import RunConfig, load_config
from pretrain.distributed import World, choose_device
from pretrain.facts import code_commit, hardware
from pretrain.throughput import OUR, Sizes, bench_config, limit_memory, measure

RESULT_LINE = "RESULT "


@dataclass(frozen=True)
class Job:
    """What one process measures.

    mixer: null for the config's own.
    checkpointing: null for the config's own, and full where that does not fit.
    memory_gib: all that it may have; null for all there is.
    """

    peer: str
    mixer: str | None
    lengths: tuple[int, ...]
    batch_tokens: int
    micro_batch_tokens: int
    updates: int
    checkpointing: str | None
    memory_gib: float | None

    @property
    def name(self) -> str:
        return self.peer if self.mixer is None else f"{self.peer}/{self.mixer}"


def run_job(config_path: Path, overrides: Sequence[str], job: Job, world: World) -> int:
    """Prints one RESULT line for each length: what `measure` returns, or why there is nothing."""
    config = load_config(config_path, overrides)
    device = choose_device(config.parallel.device, world.local_rank)
    if job.memory_gib is not None:
        limit_memory(job.memory_gib, device)
    for seq_len in job.lengths:
        wanted: tuple[str, ...] = (config.parallel.activation_checkpointing, "full")
        if job.checkpointing is not None:
            wanted = (job.checkpointing,)
        result: dict[str, Any] = {}
        for checkpointing in dict.fromkeys(wanted):
            result = _try(config, job, seq_len, checkpointing, world, device)
            if result.get("failure") != "out of memory":
                break
        print(RESULT_LINE + json.dumps(result), flush=True)
    return 0


def _try(
    config: RunConfig,
    job: Job,
    seq_len: int,
    checkpointing: str,
    world: World,
    device: torch.device,
) -> dict[str, Any]:
    sizes = Sizes(seq_len, job.batch_tokens, job.micro_batch_tokens, job.updates, checkpointing)
    tried = {"peer": job.peer, "mixer": job.mixer, "seq_len": seq_len}
    try:
        return measure(bench_config(config, job.mixer, sizes), job.peer, sizes, world, device)
    except torch.OutOfMemoryError:
        return {**tried, "failure": "out of memory"}
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # a CPU's words
            return {**tried, "failure": "out of memory"}
        return {**tried, "failure": str(error).splitlines()[0]}
    except (ValueError, MemoryError, ImportError) as error:
        return {**tried, "failure": str(error).splitlines()[0] if str(error) else "out of memory"}


def bench(
    config_path: Path,
    overrides: Sequence[str],
    jobs: Sequence[Job],
    longest: bool,
    limit: int,
    output: Path,
    console: Console,
) -> dict[str, Any]:
    """Runs the jobs one after the other; writes OUTPUT/throughput.json and .png.

    Args:
        longest: also find the longest row of each model that trains with full checkpointing.
        limit: no longer than this.
    """
    output.mkdir(parents=True, exist_ok=True)
    report = output / "throughput.json"
    config = load_config(config_path, overrides)
    device = choose_device(config.parallel.device, 0)
    result: dict[str, Any] = {
        "format_version": 1,
        "command": ["python", "-m", "pretrain", *sys.argv[1:]],
        "hardware": hardware(device),
        "torch": torch.__version__,
        "commit": code_commit(),
        "measurements": [],
        "longest": [],
    }

    def keep(kind: str, measured: dict[str, Any]) -> None:
        result[kind].append(measured)
        report.write_text(json.dumps(result, indent=1))

    for job in jobs:
        for measured in _results(config_path, overrides, job):
            keep("measurements", measured)
            console.print(_line(job, measured))
    if longest:
        for job in jobs:
            if _cannot_run(result["measurements"], job):
                continue

            def trains(seq_len: int, job: Job = job) -> bool:
                one = Job(**{**asdict(job), **_one_update(seq_len)})
                found = list(_results(config_path, overrides, one))
                fits = bool(found) and "failure" not in found[-1]
                reason = found[-1].get("failure", "trains") if found else "its process ended"
                console.print(f"{job.name}: a row of {seq_len:,} tokens: {reason}")
                return fits

            keep("longest", {"peer": job.peer, "mixer": job.mixer, "tokens": search(trains, limit)})
    plot(result, report.with_suffix(".png"))
    return result


def _cannot_run(measurements: Sequence[dict[str, Any]], job: Job) -> bool:
    """Whether all that is known of a model is failures that memory has no part in."""
    own = [m for m in measurements if m["peer"] == job.peer and job.mixer in (None, m["mixer"])]
    return all(m.get("failure", "out of memory") != "out of memory" for m in own)


def search(trains: Callable[[int], bool], limit: int) -> int:
    """The longest row <= limit that trains, to an eighth of its power of two; 0 where none does.

    Longer rows are taken to need more memory.
    """
    length = min(2048, limit)
    if not trains(length):
        return 0
    while length < limit and trains(min(2 * length, limit)):
        length = min(2 * length, limit)
    power = length
    for part in (2, 4, 8):
        step = power // part
        if step and length + step <= limit and trains(length + step):
            length += step
    return length


def _one_update(seq_len: int) -> dict[str, Any]:
    return {
        "lengths": (seq_len,),
        "batch_tokens": seq_len,
        "micro_batch_tokens": seq_len,
        "updates": 1,
        "checkpointing": "full",
    }


def _results(config_path: Path, overrides: Sequence[str], job: Job) -> Iterator[dict[str, Any]]:
    """What a process of its own measures; a failure of its own where it ends before its time."""
    command = [sys.executable, "-m", "pretrain", "bench-job", str(config_path), *overrides]
    command += ["--job", json.dumps(asdict(job))]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    told, last = 0, ""
    try:
        for line in process.stdout:
            if line.startswith(RESULT_LINE):
                told += 1
                yield json.loads(line.removeprefix(RESULT_LINE))
            elif line.strip():
                last = line.strip()
        process.wait()
    finally:
        process.kill()
        process.wait()
    for seq_len in job.lengths[told:]:
        failure = last or f"exit code {process.returncode}"
        yield {"peer": job.peer, "mixer": job.mixer, "seq_len": seq_len, "failure": failure}


def _line(job: Job, measured: dict[str, Any]) -> str:
    where = f"{job.name}: rows of {measured['seq_len']:,}"
    if "failure" in measured:
        return f"{where}: {measured['failure']}"
    return f"{where}: {measured['tokens_per_second']:,.0f} tokens/s"


def _name(measured: dict[str, Any]) -> str:
    mixer = measured["mixer"]
    return f"{measured['peer']} {mixer if isinstance(mixer, str) else '+'.join(mixer or ())}"


def table(result: dict[str, Any]) -> Table:
    """One row for each model and length."""
    shown = Table(box=box.SIMPLE, title=f"training on {result['hardware']}, {result['commit']}")
    columns = ("model", "T", "rows", "checkpointing", "tokens/s", "MFU", "GiB", "ms", "data",
               "forward", "backward", "step")  # fmt: skip
    for column in columns:
        shown.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for m in result["measurements"]:
        if "failure" in m:
            shown.add_row(_name(m), f"{m['seq_len']:,}", "-", "-", "failed")
            continue
        phases = [
            f"{1000 * m['seconds'].get(phase, 0):.1f}"
            for phase in ("all", "data", "forward", "backward", "step")
        ]
        shown.add_row(
            _name(m), f"{m['seq_len']:,}", str(m["micro_batch_rows"]), m["checkpointing"],
            f"{m['tokens_per_second']:,.0f}", "-" if m["mfu"] is None else f"{m['mfu']:.1%}",
            f"{m['peak_bytes'] / 2**30:.1f}", *phases,
        )  # fmt: skip
    return shown


def kinds_table(result: dict[str, Any]) -> Table:
    """Device milliseconds of an update by kind of kernel."""
    measured = [m for m in result["measurements"] if "failure" not in m]
    kinds = dict.fromkeys(kind for m in measured for kind in m["kinds"])
    shown = Table(box=box.SIMPLE, title="device ms of an update by kind of kernel")
    for column in ("model", "T", *kinds):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for m in measured:
        times = [f"{1000 * m['kinds'][kind]:.1f}" if kind in m["kinds"] else "-" for kind in kinds]
        shown.add_row(_name(m), f"{m['seq_len']:,}", *times)
    return shown


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens per second against T, one line for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = [m for m in result["measurements"] if "failure" not in m]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(map(_name, measured)):
        points = [m for m in measured if _name(m) == name]
        rates = [m["tokens_per_second"] for m in points]
        axes.plot([m["seq_len"] for m in points], rates, marker="o", label=name)
    axes.set(xlabel="tokens of a row", ylabel="tokens per second and GPU", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_title(f"training, {result['hardware']}")
    axes.grid(alpha=0.3)
    if measured:
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def longest_limit(limit: int | None) -> int:
    """What no row is longer than."""
    return MAX_SEQ_LEN if limit is None else min(limit, MAX_SEQ_LEN)


def jobs_of(
    against: Sequence[str], mixers: Sequence[str], lengths: tuple[int, ...], **sizes: Any
) -> list[Job]:
    """Ours and every peer's of each mixer; the config's own mixer where none is named."""
    chosen: Sequence[str | None] = mixers or [None]
    return [Job(peer, mixer, lengths, **sizes) for mixer in chosen for peer in (OUR, *against)]
