"""`python -m eval CHECKPOINT --tasks perplexity,wikitext,niah,mqar`: score a run, a checkpoint
or a model directory."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import ValidationError
from rich.console import Console

from data_prep.tokenizer import Tokenizer
from eval import report
from eval.result import Options, Result, Subject
from eval.task import TASKS
from models.checkpoint_directory import resolve
from models.weights import load_model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a step folder or a model directory.")],
    tasks: Annotated[str, typer.Option(help=f"Comma-separated: {','.join(TASKS)}.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="perplexity: a text file; may be repeated.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="perplexity, mqar: a packed data set.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of --dataset.")] = "validation",
    wikitext: Annotated[
        Path | None, typer.Option(help="wikitext: wiki.*.raw or wiki.*.tokens, plain or .xz.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens a window reads; default: max_seq_len.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="New tokens a window scores; default: the window.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="niah: comma-separated lengths in tokens; default: max_seq_len.")
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="niah: samples per length.")] = 200,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="niah: tokens to answer, part of the length; RULER has 128.")
    ] = 128,
    seed: Annotated[int, typer.Option(help="niah: seed of the samples.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per forward pass.")] = 8192,
    output: Annotated[
        Path | None, typer.Option(help="Results file; default: RUN/eval/STEP/results.json.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Score a checkpoint; results go to results.json, to a table and to the run's TensorBoard."""
    chosen = parse_tasks(tasks)
    options = Options(
        texts=tuple(text or ()),
        dataset=dataset,
        split=split,
        wikitext=wikitext,
        window=window,
        stride=stride,
        lengths=parse_lengths(lengths),
        samples=samples,
        answer_tokens=answer_tokens,
        seed=seed,
        batch_tokens=batch_tokens,
    )
    where = parse_device(device)
    model_dir = resolve(checkpoint)
    described = report.describe(model_dir)
    output = report.default_output(model_dir) if output is None else output
    earlier = report.earlier_results(output, described)
    subject = load_subject(model_dir, where)
    run = report.run_of(model_dir)

    results: list[Result] = []
    for name in chosen:
        print(f"{name} on {model_dir}", file=sys.stderr, flush=True)
        new = TASKS[name](subject, options)
        results += new
        # After every task, so that a long evaluation that is stopped keeps what it has.
        report.write_results(output, described, earlier, results)
        if run is not None:
            report.write_scalars(run, described["step"], new)
    for table in report.tables(results):
        Console().print(table)
    print(f"results: {output}")


def parse_tasks(text: str) -> list[str]:
    """The task names, in order, without repetition."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise ValueError(
            f"unknown task: got {','.join(unknown) or 'none'}; expected some of {','.join(TASKS)}; "
            "correct --tasks"
        )
    return names


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens, each >= 1."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--lengths is not a list of lengths: got {text}; expected numbers >= 1, as in 256,512"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def parse_device(name: str) -> str:
    """cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device: got {name}; expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU here: got --device cuda; expected a CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def load_subject(model_dir: Path, device: str) -> Subject:
    """The model on `device`, with its tokenizer where the directory has one."""
    model = load_model(model_dir, device=device)
    path = model_dir / "tokenizer.model"
    tokenizer = Tokenizer.load(path) if path.is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer is larger than the model's vocabulary: got {tokenizer.vocab_size} ids in "
            f"{path}; "
            f"expected at most {model.config.vocab_size}; use the tokenizer that the model was "
            "trained with"
        )
    return Subject(
        model=model,
        vocab_size=model.config.vocab_size,
        max_seq_len=model.config.max_seq_len,
        tokenizer=tokenizer,
        device=device,
    )


def main() -> None:
    """The command line: user errors become one line and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        app()
    except ValidationError as error:
        for problem in error.errors():
            place = ".".join(map(str, problem["loc"]))
            print(f"error: {place}: {problem['msg']}: got {problem['input']!r}", file=sys.stderr)
        sys.exit(2)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        print(f"error: evaluation failed: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
