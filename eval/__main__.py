"""`python -m eval CHECKPOINT [CHECKPOINT ...] --tasks wikitext,niah,mqar,...`: score runs,
checkpoints and model directories; `compare` puts models side by side, `selftest` tests the tasks.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from data_prep.early_interrupt import end_as_usual, end_quietly_while_importing

is_quiet = end_quietly_while_importing(__name__)

import torch
import typer
from pydantic import ValidationError
from rich.console import Console

from data_prep.command_line import INTERRUPTED, default_command, run_command_line
from eval import compare as comparison
from eval import plots, report, selftest
from eval.evaluation import EvaluationFailed, checked_units, evaluate, one_line, targets
from eval.result import Options
from eval.task import NAMES, find_task

app = typer.Typer(
    cls=default_command("evaluate"), add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def main_help() -> None:
    """Scores checkpoints. `python -m eval CHECKPOINT` is short for `evaluate CHECKPOINT`."""


@app.command("evaluate")
def evaluate_command(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Runs, step folders or model directories.")
    ],
    tasks: Annotated[str, typer.Option(help=f"Comma-separated: {','.join(NAMES)}.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="perplexity, loss-by-position: a text file; may be repeated."),
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="perplexity, mqar, selective-copy: a packed data set.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of --dataset.")] = "validation",
    wikitext: Annotated[
        Path | None, typer.Option(help="wikitext: wiki.*.raw or wiki.*.tokens, plain or .xz.")
    ] = None,
    wikitext_download: Annotated[
        str | None, typer.Option(help="wikitext: NAME:SPLIT to fetch, as wikitext-2-raw-v1:test.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens a window reads; default: as trained.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="New tokens a window scores; default: the window.")
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(help="Comma-separated lengths in tokens of NIAH, drawn rows and blocks."),
    ] = "",
    beyond_trained: Annotated[
        bool, typer.Option(help="Also score input longer than the rows of the training.")
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per NIAH task, drawn rows, blocks; default 200."),
    ] = None,
    niah_tasks: Annotated[
        str, typer.Option(help="niah: comma-separated RULER tasks; default: all that can be.")
    ] = "",
    haystack: Annotated[
        Path | None, typer.Option(help="niah: the text that needles are hidden in.")
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="niah: tokens to answer, part of the length; RULER has 128.")
    ] = 128,
    pairs: Annotated[
        str, typer.Option(help="mqar, selective-copy: draw rows with so many pairs, as in 4,8.")
    ] = "",
    variant: Annotated[
        str | None, typer.Option(help="Of drawn rows: zoology or s4, or adaptive-decay.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Ids of drawn rows.")] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="lm-eval: examples before a question.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per forward pass.")] = 8192,
    all_checkpoints: Annotated[
        bool, typer.Option(help="Every complete checkpoint of a run: a curve in TensorBoard.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Results file; default: RUN/eval/STEP/results.json.")
    ] = None,
    comparison_folder: Annotated[
        Path | None, typer.Option("--compare", help="Also write a comparison into this folder.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a Ray cluster, or auto; without --gpus or --workers all of it."
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=0, help="Spread tasks and checkpoints over so many GPUs by Ray.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=0, help="The same over so many CPU processes.")] = 0,
) -> None:
    """Score checkpoints; results go to results.json, to a table and to the run's TensorBoard."""
    chosen = parse_tasks(tasks)
    check_seed(seed)
    options = Options(
        texts=tuple(text or ()),
        dataset=dataset,
        split=split,
        wikitext=wikitext,
        wikitext_download=wikitext_download,
        window=window,
        stride=stride,
        lengths=parse_numbers("--lengths", lengths, "lengths", "256,512"),
        samples=200 if samples is None else samples,
        limit=samples,
        niah_tasks=tuple(name.strip() for name in niah_tasks.split(",") if name.strip()),
        haystack=haystack,
        answer_tokens=answer_tokens,
        pairs=parse_numbers("--pairs", pairs, "numbers", "4,8"),
        variant=variant,
        task_vocab_size=vocab_size,
        fewshot=fewshot,
        seed=seed,
        batch_tokens=batch_tokens,
    )
    where = parse_device(device)
    check_spread(gpus, workers)
    found = targets(checkpoints, output, all_checkpoints=all_checkpoints)
    units = checked_units(found, chosen, options, device=where, beyond_trained=beyond_trained)
    if gpus or workers or address is not None:
        from eval.spread import connected, run_spread

        with connected(address, gpus, workers) as places:
            results = evaluate(units, partial(run_spread, places=places))
    else:
        results = evaluate(units)
    for target in found:
        if len(found) > 1:
            print(f"\n{target.model_dir}")
        for table in report.tables(results[target.model_dir]):
            Console().print(table)
        for path in plots.of_one_model(target.output.parent, chosen):
            print(f"plot: {path}")
        print(f"results: {target.output}")
    if comparison_folder is not None:
        print(f"comparison: {comparison.write(found, comparison_folder, chosen)}")


@app.command()
def compare(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Two or more models that have been scored.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of report.md and its plots.")] = Path(
        "comparison"
    ),
    tasks: Annotated[str, typer.Option(help="Comma-separated; default: all that were run.")] = "",
) -> None:
    """Put the results of several models side by side, with paired tests and plots."""
    found = targets(checkpoints, None, all_checkpoints=False)
    print(comparison.write(found, output, parse_tasks(tasks) if tasks else None))


@app.command("selftest")
def selftest_command(
    wikitext_train: Annotated[
        Path | None, typer.Option(help="wiki.train.tokens: the unigram model's counts.")
    ] = None,
    wikitext: Annotated[
        list[Path] | None, typer.Option(help="wiki.*.tokens it is scored on; may be repeated.")
    ] = None,
) -> None:
    """Run models whose scores are known through every task; exit code 1 where one differs."""
    lines = selftest.run(wikitext_train, tuple(wikitext or ()))
    Console().print(selftest.table(lines))
    if broken := [line for line in lines if not line.holds]:
        raise EvaluationFailed(
            f"{len(broken)} of {len(lines)} checks do not hold: {broken[0].describe()}"
        )


def parse_tasks(text: str) -> list[str]:
    """The task names, in order, without repetition."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names or ["none"]:
        find_task(name)
    return names


def parse_numbers(option: str, text: str, what: str, example: str) -> tuple[int, ...]:
    """Comma-separated numbers, each >= 1."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"{option} is not a list of {what}: got {text}; expected numbers >= 1, as in {example}"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def check_seed(seed: int) -> None:
    """Refuse what some generator of random numbers would not take."""
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"--seed is out of range: got {seed}; expected 0 to {(1 << 32) - 1}")


def parse_device(name: str) -> str:
    """cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device: got {name}; expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU here: got --device cuda; expected a CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def check_spread(gpus: int, workers: int) -> None:
    """Refuse a number of GPUs and one of CPU processes at once."""
    if gpus and workers:
        raise ValueError(
            f"--gpus and --workers exclude each other: got {gpus} and {workers}; expected one"
        )


def main() -> None:
    """The command line; one line and exit code 2 for what is refused before the first task, 1 for
    what fails later."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        status = run_command_line(app)
        if status == INTERRUPTED:
            print("interrupted; the same command goes on where it was", file=sys.stderr)
        sys.exit(status)
    except ValidationError as error:
        for problem in error.errors():
            place = ".".join(map(str, problem["loc"]))
            print(f"error: {place}: {problem['msg']}: got {problem['input']!r}", file=sys.stderr)
        sys.exit(2)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except EvaluationFailed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except RuntimeError as error:
        print(f"error: evaluation failed: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    if is_quiet:
        end_as_usual()
    main()
