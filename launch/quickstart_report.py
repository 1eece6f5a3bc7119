"""The quickstart's last table, from what the stages left on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from data_prep.ray_cluster import ROOT
from pretrain.config import RunConfig

LAST_STEPS = 20
NIAH_SAMPLES = 20


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results of an evaluation (eval/report.py writes them); empty where there are none yet."""
    path = ROOT / path
    return json.loads(path.read_bytes())["results"] if path.is_file() else []


def scores(results: list[dict[str, Any]], config: RunConfig) -> dict[tuple[str, str], float]:
    """(task, metric) -> value of the quickstart's own evaluation; empty if it is not all there.

    The same file may hold other evaluations of the model.
    """
    niah = {"length": config.data.seq_len, "samples": NIAH_SAMPLES}
    perplexity = {"dataset": str(config.data.dataset), "split": "validation"}
    wanted: dict[str, dict[str, Any]] = {"niah": niah, "perplexity": perplexity}
    found = {
        (r["task"], r["metric"]): float(r["value"])
        for r in results
        if r["task"] in wanted and wanted[r["task"]].items() <= r["settings"].items()
    }
    return found if {task for task, _ in found} == set(wanted) else {}


def losses(log: Path) -> list[tuple[int, float]]:
    """(step, training loss) of every step in a run's log.jsonl; a cut last line is skipped."""
    found = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("loss") is not None:
            found[int(entry["step"])] = float(entry["loss"])  # a resumed run logs some steps again
    return sorted(found.items())


def parameter_count(weights: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    total = 0
    with safe_open(weights, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            size = 1
            for length in file.get_slice(name).get_shape():
                size *= length
            total += size
    return total


def show(config: RunConfig, console: Console) -> None:
    """Prints what was trained, how it scores, where it is and what to do next."""
    run = config.run_dir
    step_name = f"step-{config.training.total_steps:08d}"
    step_dir = ROOT / run / "checkpoints" / step_name
    value = scores(read_results(run / "eval" / step_name / "results.json"), config)
    steps = losses(ROOT / run / "log.jsonl")
    ending = [loss for _, loss in steps[-LAST_STEPS:]]  # one batch is noisy
    model = config.model
    lambdas = model.level_weights.kind
    rows = [
        ("model", f"{model.mixer}, {lambdas} lambda, {model.num_levels} levels"),
        ("parameters", f"{parameter_count(step_dir / 'model.safetensors'):,}"),
        ("trained on", f"{config.training.total_steps * config.batch.batch_tokens:,} tokens"),
        ("loss at the start", f"{steps[0][1]:.3f} nats per token (step {steps[0][0]})"),
        ("loss at the end", f"{fmean(ending):.3f} (mean of the last {len(ending)} steps)"),
        ("held out: loss", f"{value['perplexity', 'nll_per_token']:.3f}"),
        (
            "held out: unigram entropy",
            f"{value['perplexity', 'unigram_entropy']:.3f} (best possible without context)",
        ),
        ("held out: perplexity", f"{value['perplexity', 'perplexity']:.2f} per token"),
        ("held out: bits per byte", f"{value['perplexity', 'bits_per_byte']:.3f}"),
        (
            f"S-NIAH-1, {NIAH_SAMPLES} samples",
            f"{value['niah', 'accuracy']:.0f} % (needs far more training)",
        ),
        ("S-NIAH-1 retrieval gain", f"{value['niah', 'retrieval_gain']:+.3f} nats per token"),
        ("checkpoint", str(run / "checkpoints" / step_name)),
        ("results", str(run / "eval" / step_name / "results.json")),
        ("data", str(config.data.dataset)),
    ]
    table = Table(title="Quickstart complete", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)
    console.print("Sample:")
    sample = ROOT / run / "eval" / step_name / "sample.txt"
    console.print(sample.read_text(encoding="utf-8"), markup=False)
    console.print("Next:")
    activate = _activation()
    for command in (
        *([f"source {activate}"] if activate else []),
        f"tensorboard --logdir {run}/tensorboard",
        f"python -m data_prep inspect {config.data.dataset}",
        f"python -m models inspect {run}",
        f"python -m models generate {run} --prompt 'class '",
        f"python -m launch pretrain/configs/quickstart.yaml --cpu-workers 2 run_dir={run}-linear "
        f"data.dataset={config.data.dataset} model.mixer=mamba2",
    ):
        console.print(f"  {command}", markup=False, soft_wrap=True)


def _activation() -> Path | None:
    """The script that makes `python` the one that runs here, if it lives in an environment."""
    script = Path(sys.prefix) / "bin" / "activate"
    if not script.is_file():
        return None
    return script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
