"""`python -m launch.quickstart`: from a corpus that every machine has to an evaluated checkpoint.

Five commands of this repository, each shown and run as a user would run it. A stage whose result is
there is skipped, so a second run only shows the results and an interrupted one goes on.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from data_prep.command_line import run_command_line
from data_prep.ray_cluster import ROOT
from launch.quickstart_report import NIAH_SAMPLES, read_results, scores, show
from models.checkpoint_directory import verify
from pretrain.config import RunConfig, load_config

CONFIG = ROOT / "pretrain" / "configs" / "quickstart.yaml"
VALIDATION_FRACTION = "0.02"
PROMPT = "def read_lines(path):\n"
WORKERS = "2"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Stage:
    """One command. `keep`: where its output is kept beside being shown."""

    title: str
    argv: list[str]
    done: Callable[[], bool]
    keep: Path | None = None


class StageFailed(Exception):
    """A stage's command ended with `code`; it has said why."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def stages(config: RunConfig, overrides: Sequence[str]) -> list[Stage]:
    """The commands, in order; each is done when its last-written file is there."""
    dataset = config.data.dataset
    tokenizer = dataset.with_name(f"{dataset.name}.model")
    run = config.run_dir
    step = f"step-{config.training.total_steps:08d}"
    results = run / "eval" / step / "results.json"
    sample = run / "eval" / step / "sample.txt"
    return [
        Stage(
            "Tokenizer from Python's standard library",
            ["data_prep", "tokenizer", "stdlib", "--output", str(tokenizer)]
            + [
                "--vocab-size",
                str(config.model.vocab_size),
                "--validation-fraction",
                VALIDATION_FRACTION,
            ]
            + ["--sample-bytes", str(4 << 20)],
            tokenizer.is_file,
        ),
        Stage(
            "Packed rows in MDS shards",
            ["data_prep", "pack", "stdlib", "--tokenizer", str(tokenizer)]
            + ["--output", str(dataset), "--row-tokens", str(config.data.seq_len)]
            + ["--validation-fraction", VALIDATION_FRACTION],
            (dataset / "manifest.json").is_file,
        ),
        Stage(
            f"Training on {WORKERS} workers through Ray",
            ["launch", str(CONFIG.relative_to(ROOT)), "--cpu-workers", WORKERS, *overrides],
            lambda: not verify(run / "checkpoints" / step, hashes=False),
        ),
        Stage(
            "Evaluation",
            ["eval", str(run), "--tasks", "perplexity,niah", "--dataset", str(dataset)]
            + ["--split", "validation", "--lengths", str(config.data.seq_len)]
            + ["--samples", str(NIAH_SAMPLES), "--answer-tokens", "16"],
            lambda: bool(scores(read_results(results), config)),
        ),
        Stage(
            "A sample",
            ["models", "generate", str(run), "--prompt", PROMPT, "--max-new-tokens", "120"]
            + ["--temperature", "0.7", "--top-p", "0.9"],
            sample.is_file,
            keep=sample,
        ),
    ]


def run_stage(argv: list[str], keep: Path | None) -> None:
    """Runs `python -m *argv` with its output on ours. StageFailed where it does not end with 0."""
    command = [sys.executable, "-m", *argv]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE if keep else None, text=True
    )

    def pass_on(signum: int, frame: FrameType | None) -> None:
        # Ctrl-C reaches the child by itself, from the terminal; we wait until it has cleaned up.
        if signum == signal.SIGTERM:
            process.terminate()

    before = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        output, _ = process.communicate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if process.returncode:
        raise StageFailed(process.returncode)
    if keep:
        temporary = keep.with_name(keep.name + ".tmp")
        temporary.write_text(output, encoding="utf-8")
        temporary.replace(keep)


@app.command()
def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value for the training config.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="For the data set; the tokenizer goes beside it.")
    ] = Path("data/quickstart"),
    run_dir: Annotated[Path, typer.Option(help="For the run.")] = Path("runs/quickstart"),
) -> None:
    """Corpus, tokenizer, shards, training, evaluation, sample: a few minutes on two cores."""
    # The stages run in the repository root; the user's paths start where the user is.
    data_dir, run_dir = (_from_root(path) for path in (data_dir, run_dir))
    changes = [f"run_dir={run_dir}", f"data.dataset={data_dir}", *(overrides or [])]
    config = load_config(CONFIG, changes)
    console = Console(highlight=False)
    plan = stages(config, changes)
    for number, stage in enumerate(plan, start=1):
        title = f"[{number}/{len(plan)}] {stage.title}"
        if stage.done():
            console.print(f"{title}: complete", markup=False)
            continue
        shown = shlex.join(["python", "-m", *stage.argv])
        console.print(f"{title}\n$ {shown}", markup=False, soft_wrap=True)
        run_stage(stage.argv, stage.keep)
    show(config, console)


def _from_root(path: Path) -> Path:
    """The path as seen from the repository root: relative where it lies inside."""
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def main() -> None:
    """The command line: a failed stage has already said why; its exit code is ours."""
    try:
        code = run_command_line(app)
    except StageFailed as error:
        code = error.code if error.code > 0 else 128 - error.code
        if code >= 128:  # a signal; an error has said what to do about it
            print("quickstart stopped; the same command goes on from here", file=sys.stderr)
    except (OSError, ValueError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
