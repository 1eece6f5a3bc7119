"""Command line of data preparation: tokenizer, pack, synth, inspect, verify, bench."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console

from data_prep.bench import bench
from data_prep.command_line import INTERRUPTED, run_command_line
from data_prep.inspection import inspect, reconciliation
from data_prep.mqar import VOCAB_SIZE as MQAR_VOCAB_SIZE
from data_prep.mqar import MqarTask, MqarVariant
from data_prep.prepare import prepare
from data_prep.recipe import Order, PackRequest, Source, load_recipe, one_line
from data_prep.selective_copy import VOCAB_SIZE as COPY_VOCAB_SIZE
from data_prep.selective_copy import CopyVariant, SelectiveCopyTask
from data_prep.shards import Manifest, Rows, read_manifest
from data_prep.synth import write_task
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizer_command import (
    INPUT_HELP,
    Fraction,
    IdField,
    Include,
    Seed,
    TextField,
)
from data_prep.tokenizer_command import tokenizer as tokenizer_app

app = typer.Typer(add_completion=False, help=__doc__)
app.add_typer(tokenizer_app, name="tokenizer")
synth = typer.Typer(help="Write a synthetic task as a data set.")
app.add_typer(synth, name="synth")

DatasetOutput = Annotated[Path, typer.Option(help="Folder of the new data set.")]


@app.command()
def pack(
    tokenizer: Annotated[Path, typer.Option(help="The .model file.")],
    output: DatasetOutput,
    row_tokens: Annotated[int, typer.Option(help="Tokens in a row.")],
    inputs: Annotated[list[str] | None, typer.Argument(metavar="INPUT", help=INPUT_HELP)] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="YAML file of several sources with weights, in place of INPUT."),
    ] = None,
    validation: Annotated[
        list[str], typer.Option(help="Input for the validation split; repeatable.")
    ] = [],  # noqa: B006
    validation_fraction: Fraction = 0.0,
    include: Include = [],  # noqa: B006
    text_field: TextField = "text",
    id_field: IdField = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Shorter documents are skipped (bos and eos count).")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longer documents are skipped.")] = None,
    length_weight: Annotated[
        list[str],
        typer.Option(
            metavar="TOKENS:WEIGHT",
            help="Use documents of at least TOKENS tokens WEIGHT times (0.5: half of them); "
            "repeatable, the largest TOKENS that fits counts.",
        ),
    ] = [],  # noqa: B006
    order: Annotated[
        Order, typer.Option(help="Of documents in the rows; longest-first is for a curriculum.")
    ] = "corpus",
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Write documents of equal content each time.")
    ] = False,
    near_duplicates: Annotated[
        float | None,
        typer.Option(
            metavar="SIMILARITY",
            help="Skip documents that share this much of their word 5-grams (Jaccard, such as "
            "0.8) with an earlier one. Needs the extra near-duplicates.",
        ),
    ] = None,
    exclude_overlap: Annotated[
        list[str],
        typer.Option(help="Evaluation texts that training must not have seen; repeatable."),
    ] = [],  # noqa: B006
    overlap_words: Annotated[
        int, typer.Option(help="Words in a row that count as an overlap.")
    ] = 13,
    overlap: Annotated[
        Literal["drop", "report"], typer.Option(help="What to do with such documents.")
    ] = "drop",
    seed: Seed = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes; more than one run as Ray tasks. Default: one a processor if there is "
            "enough to do, or all of a cluster's."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a running Ray cluster (or auto) to work on."),
    ] = None,
) -> None:
    """Tokenise documents and pack them into rows; the same command goes on after a kill."""
    if (recipe is None) == (not inputs):
        raise ValueError("what to pack is unclear: expected INPUT... or --recipe FILE, one of them")
    if recipe is not None:
        if validation or include or text_field != "text" or id_field:
            raise ValueError(
                "--validation, --include, --text-field and --id-field act on INPUT only: got them "
                "with --recipe; write them into the recipe"
            )
        sources = load_recipe(recipe)
    else:
        fields: dict[str, Any] = {
            "include": tuple(include),
            "text_field": text_field,
            "id_field": id_field,
        }
        sources = (Source(inputs=tuple(inputs or ()), **fields),)
        if validation:
            sources += (Source(inputs=tuple(validation), split="validation", **fields),)
    try:
        request = PackRequest(
            sources=sources,
            row_tokens=row_tokens,
            validation_fraction=validation_fraction,
            seed=seed,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            length_weights=tuple(map(_length_weight, length_weight)),
            order=order,
            keep_duplicates=keep_duplicates,
            near_duplicates=near_duplicates,
            exclude_overlap=tuple(exclude_overlap),
            overlap_words=overlap_words,
            overlap=overlap,
            recipe=str(recipe) if recipe is not None else None,
        )
    except ValidationError as error:
        raise ValueError(one_line(error)) from None
    manifest, made = prepare(request, Tokenizer.load(tokenizer), output, workers, address)
    _report(output, manifest, made)


@synth.command()
def mqar(
    output: DatasetOutput,
    rows: Annotated[int, typer.Option(help="Rows to train on.")],
    validation_rows: Annotated[int, typer.Option(help="Rows to validate on.")] = 1000,
    variant: Annotated[
        MqarVariant, typer.Option(help="Whose task; their numbers are not comparable.")
    ] = "zoology",
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 64,
    pairs: Annotated[int, typer.Option(help="Key-value pairs in a row.")] = 4,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Ids: lower half keys, upper half values. Default: 8192, or 128."),
    ] = None,
    power: Annotated[
        float, typer.Option(help="zoology: how early queries come; 1 = anywhere.")
    ] = 0.01,
    random_non_queries: Annotated[
        bool, typer.Option(help="zoology: fill blanks with random ids instead of 0.")
    ] = True,
    seed: Seed = 0,
) -> None:
    """Multi-query associative recall (data_prep/mqar.py)."""
    task = MqarTask(
        seq_len=seq_len,
        pairs=pairs,
        vocab_size=MQAR_VOCAB_SIZE[variant] if vocab_size is None else vocab_size,
        power=power,
        random_non_queries=random_non_queries,
        variant=variant,
    )
    made = write_task(task, output, rows=rows, validation_rows=validation_rows, seed=seed)
    _report(output, *made)


@synth.command()
def selective_copy(
    output: DatasetOutput,
    rows: Annotated[int, typer.Option(help="Rows to train on.")],
    validation_rows: Annotated[int, typer.Option(help="Rows to validate on.")] = 1000,
    variant: Annotated[
        CopyVariant, typer.Option(help="Whose task; their numbers are not comparable.")
    ] = "s4",
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 256,
    copied: Annotated[int, typer.Option(help="Tokens to copy.")] = 16,
    vocab_size: Annotated[int | None, typer.Option(help="Default: 16, or 128.")] = None,
    seed: Seed = 0,
) -> None:
    """Selective copying (data_prep/selective_copy.py)."""
    task = SelectiveCopyTask(
        seq_len=seq_len,
        copied=copied,
        vocab_size=COPY_VOCAB_SIZE[variant] if vocab_size is None else vocab_size,
        variant=variant,
    )
    made = write_task(task, output, rows=rows, validation_rows=validation_rows, seed=seed)
    _report(output, *made)


@app.command(name="inspect")
def inspect_command(
    dataset: Annotated[Path, typer.Argument(help="Folder of a data set.")],
    split: Annotated[str, typer.Option(help="Split to read samples and lengths from.")] = "train",
    samples: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 2,
    at_least: Annotated[
        list[int],
        typer.Option(
            help="Count the rows that have a document of at least so many tokens; repeatable. "
            "Default: powers of two.",
        ),
    ] = [],  # noqa: B006
) -> None:
    """Show what a data set holds: counts, document lengths, decoded samples."""
    if at_least and min(at_least) < 1:
        raise ValueError(f"at-least is too small: got {min(at_least)}; expected at least 1")
    inspect(dataset, Console(), split=split, samples=samples, at_least=at_least)


@app.command()
def verify(
    dataset: Annotated[Path, typer.Argument(help="Folder of a data set.")],
) -> None:
    """Read every file of a data set and hold it against its hash."""
    manifest = read_manifest(dataset)
    problems = [problem for split in manifest.splits for problem in Rows(dataset, split).problems()]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)
    print(f"{dataset}: every file is what was written")


@app.command(name="bench")
def bench_command(
    dataset: Annotated[Path, typer.Argument(help="Folder of a data set.")],
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a training row. Default: row_tokens.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split to read.")] = "train",
    threads: Annotated[int, typer.Option(min=1, help="Threads that read and decode.")] = 2,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows stacked into one array.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to read.")] = 5.0,
) -> None:
    """Measure how fast training rows are read, decoded and stacked, in shuffled order."""
    print(
        bench(
            dataset,
            split,
            seq_len=seq_len,
            threads=threads,
            batch_rows=batch_rows,
            seconds=seconds,
        )
    )


def _length_weight(typed: str) -> tuple[int, float]:
    tokens, _, weight = typed.partition(":")
    try:
        if not math.isfinite(float(weight)):
            raise ValueError
        return int(tokens), float(weight)
    except ValueError:
        raise ValueError(
            f"length-weight is not understood: got {typed}; expected TOKENS:WEIGHT, two "
            "numbers, such as 32768:2"
        ) from None


def _report(output: Path, manifest: Manifest, made: bool) -> None:
    splits = ", ".join(
        f"{name} {facts.rows} rows ({facts.tokens} tokens, {facts.documents} documents)"
        for name, facts in manifest.splits.items()
    )
    print(f"{output}: {splits}{'' if made else '; was complete already, nothing done'}")
    for line in reconciliation(manifest):
        print(line)


def main() -> int:
    """Run the command line; 0 done, 2 the user's mistake in one line, 1 failed at run time."""
    stopped_by: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        """SIGTERM ends a command like Ctrl-C; SystemExit in a call of Ray would be lost there."""
        del frame
        stopped_by.append(signum)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        status = _run()
    finally:
        signal.signal(signal.SIGTERM, before)
    if stopped_by:
        status = 128 + stopped_by[0]
        print("terminated; the same command goes on where it was", file=sys.stderr)
    elif status == INTERRUPTED:
        print("interrupted; the same command goes on where it was", file=sys.stderr)
    return status


def _run() -> int:
    try:
        return run_command_line(app)
    except (ValueError, FileNotFoundError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
