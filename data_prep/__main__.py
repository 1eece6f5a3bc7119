"""Command line of data preparation: tokenizer, pack, synth, inspect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from data_prep.dataset_folder import write_atomically
from data_prep.inspection import inspect
from data_prep.mqar import VOCAB_SIZE as MQAR_VOCAB_SIZE
from data_prep.mqar import MqarTask, MqarVariant
from data_prep.prepare import PackRequest, check_fraction, prepare
from data_prep.progress import byte_progress
from data_prep.selective_copy import VOCAB_SIZE as COPY_VOCAB_SIZE
from data_prep.selective_copy import CopyVariant, SelectiveCopyTask
from data_prep.shards import Manifest
from data_prep.sources import (
    UNIT_BYTES,
    Document,
    held_out,
    list_files,
    make_units,
    read_documents,
    sample_units,
    unit_size,
)
from data_prep.synth import write_task
from data_prep.tokenizer import SAMPLE_BYTES, Tokenizer, train_tokenizer

# How much more text than the sample a tokenizer reads of a large corpus to draw the sample from.
READ_FACTOR = 4
INTERRUPTED = 130  # what typer turns Ctrl-C into

app = typer.Typer(add_completion=False, help=__doc__)
synth = typer.Typer(help="Write a synthetic task as a data set.")
app.add_typer(synth, name="synth")

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help='Text or JSONL files (.gz, .xz, .bz2 too), folders, or "stdlib": the source of '
        "Python's own standard library.",
    ),
]
Include = Annotated[
    list[str], typer.Option(help='File names to take inside folders, such as "*.py"; repeatable.')
]
Fraction = Annotated[
    float, typer.Option(help="Share of documents held out for validation, chosen by name and seed.")
]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
DatasetOutput = Annotated[Path, typer.Option(help="Folder of the new data set.")]


@app.command()
def tokenizer(
    inputs: Inputs,
    output: Annotated[Path, typer.Option(help="The .model file to write.")],
    vocab_size: Annotated[int, typer.Option(help="Pieces, 256 bytes and specials included.")],
    validation_fraction: Fraction = 0.0,
    include: Include = [],  # noqa: B006 (typer's way to an empty default)
    sample_bytes: Annotated[
        int, typer.Option(min=1, help="Most text to train on; a sample is drawn from more.")
    ] = SAMPLE_BYTES,
    seed: Seed = 0,
) -> None:
    """Train a SentencePiece tokenizer that represents every text exactly.

    With the --validation-fraction and --seed of the later pack, documents held out there are not
    trained on here.
    """
    check_fraction(validation_fraction)
    files = list_files(inputs, include)
    units = sample_units(make_units(files, UNIT_BYTES), READ_FACTOR * sample_bytes, seed)
    with byte_progress("reading", sum(map(unit_size, units))) as advance:

        def texts() -> Iterator[str]:
            for unit in units:
                for document in read_documents(unit):
                    if isinstance(document, Document) and not held_out(
                        document.name, validation_fraction, seed
                    ):
                        yield document.text
                advance(unit_size(unit))

        model = train_tokenizer(texts(), vocab_size, sample_bytes=sample_bytes, seed=seed)
    trained = Tokenizer(model, origin=str(output))
    if output.exists() and (not output.is_file() or output.read_bytes() != model):
        raise ValueError(
            f"output {output} exists and is another tokenizer or file; choose another --output or "
            "remove it"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, model)
    print(f"{output}: {trained.vocab_size} pieces, sha256 {trained.sha256}")


@app.command()
def pack(
    inputs: Inputs,
    tokenizer: Annotated[Path, typer.Option(help="The .model file.")],
    output: DatasetOutput,
    row_tokens: Annotated[int, typer.Option(help="Tokens in a row.")],
    validation: Annotated[
        list[str], typer.Option(help="Input for the validation split; repeatable.")
    ] = [],  # noqa: B006
    validation_fraction: Fraction = 0.0,
    include: Include = [],  # noqa: B006
    seed: Seed = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that tokenise; more than one run as Ray tasks. "
            "Default: one a processor if there is enough to do."
        ),
    ] = None,
) -> None:
    """Tokenise documents and pack them into rows; the same command goes on after a kill."""
    request = PackRequest(
        inputs=tuple(inputs),
        row_tokens=row_tokens,
        validation_inputs=tuple(validation),
        validation_fraction=validation_fraction,
        include=tuple(include),
        seed=seed,
    )
    _report(output, *prepare(request, Tokenizer.load(tokenizer), output, workers))


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
    scan_rows: Annotated[int, typer.Option(min=1, help="Rows that the histogram covers.")] = 1000,
) -> None:
    """Show what a data set holds: counts, document lengths, decoded samples."""
    inspect(dataset, Console(), split=split, samples=samples, scan_rows=scan_rows)


def _report(output: Path, manifest: Manifest, made: bool) -> None:
    splits = ", ".join(
        f"{name} {facts.rows} rows ({facts.tokens} tokens, {facts.documents} documents)"
        for name, facts in manifest.splits.items()
    )
    print(f"{output}: {splits}{'' if made else '; was complete already, nothing done'}")
    for reason, entry in manifest.skipped.items():
        print(f"  skipped {entry.count}, {reason}: {', '.join(entry.examples)}")


def main() -> int:
    """Run the command line; 0 done, 2 the user's mistake in one line, 1 failed at run time."""
    try:
        status = app(standalone_mode=False) or 0
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        # A usage error. typer carries its own copy of click, so the class has no stable name.
        if not hasattr(error, "format_message"):
            raise
        print(f"error: {error.format_message()}; see --help", file=sys.stderr)
        return 2
    if status == INTERRUPTED:
        print("interrupted; the same command goes on where it was", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
