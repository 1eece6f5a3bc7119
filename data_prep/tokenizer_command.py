"""The tokenizer commands: train, eval; and the options that they share with pack."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from data_prep.command_line import default_command
from data_prep.dataset_folder import write_atomically
from data_prep.formats import Reading, Skipped, Unreadable
from data_prep.progress import stage
from data_prep.recipe import check_fraction
from data_prep.sources import (
    STDIN_INPUT,
    UNIT_BYTES,
    Unit,
    held_out,
    list_files,
    make_units,
    read_documents,
    sample_units,
    spool_stdin,
)
from data_prep.tokenizer import SAMPLE_BYTES, ModelType, Tokenizer, train_tokenizer
from data_prep.unit_files import Reasons

# How much more text than the sample a tokenizer reads of a large corpus to draw the sample from.
READ_FACTOR = 4
EVAL_BYTES = 64 << 20
OTHER_SPLIT = "on the other side of --validation-fraction"


tokenizer = typer.Typer(
    cls=default_command("train"), help="Train a tokenizer (`tokenizer INPUT...`), or evaluate one."
)


def _seed(seed: int) -> int:
    if seed < 0:
        raise ValueError(f"seed is too small: got {seed}; expected at least 0")
    return seed


INPUT_HELP = (
    "Text, JSONL or parquet files, plain or .gz, .zst, .xz, .bz2; folders, globs, URLs that fsspec "
    'opens, hf:NAME of the Hugging Face hub, "-" for JSON lines from standard input, or "stdlib": '
    "the source of Python's own standard library."
)
Inputs = Annotated[list[str], typer.Argument(metavar="INPUT", help=INPUT_HELP)]
Include = Annotated[
    list[str], typer.Option(help='File names to take inside folders, such as "*.py"; repeatable.')
]
TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]
IdField = Annotated[
    str | None, typer.Option(help="Field that names a document; default: its file and position.")
]
Fraction = Annotated[
    float, typer.Option(help="Share of documents held out for validation, chosen by name and seed.")
]
Seed = Annotated[int, typer.Option(callback=_seed, help="Seed of every random choice.")]


@tokenizer.command(name="train")
def train_command(
    inputs: Inputs,
    output: Annotated[Path, typer.Option(help="The .model file to write.")],
    vocab_size: Annotated[int, typer.Option(help="Pieces, 256 bytes and specials included.")],
    model_type: Annotated[ModelType, typer.Option(help="Kind of vocabulary.")] = "bpe",
    validation_fraction: Fraction = 0.0,
    include: Include = [],  # noqa: B006 (typer's way to an empty default)
    text_field: TextField = "text",
    id_field: IdField = None,
    sample_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most text to train on; a sample is drawn from more. Bounds memory: about 10 "
            "times this for bpe, 25 times for unigram.",
        ),
    ] = SAMPLE_BYTES,
    seed: Seed = 0,
) -> None:
    """Train a SentencePiece tokenizer that represents every text exactly.

    With the --validation-fraction and --seed of the later pack, documents held out there are not
    trained on here.
    """
    check_fraction(validation_fraction)
    left_out = Reasons()
    with tempfile.TemporaryDirectory() as folder:
        units = _units(inputs, include, Reading(text_field, id_field), Path(folder))
        read = sample_units(units, READ_FACTOR * sample_bytes, seed)
        texts = _texts(
            read,
            "reading",
            lambda name: not held_out(name, validation_fraction, seed),
            left_out,
        )
        model = train_tokenizer(
            texts, vocab_size, model_type=model_type, sample_bytes=sample_bytes, seed=seed
        )
    trained = Tokenizer(model, origin=str(output))
    if output.exists() and (not output.is_file() or output.read_bytes() != model):
        raise ValueError(
            f"output {output} exists and is another tokenizer or file; choose another --output or "
            "remove it"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, model)
    print(f"{output}: {trained.vocab_size} pieces, sha256 {trained.sha256}")
    _print_left_out(left_out, read, units)


@tokenizer.command(name="eval")
def eval_command(
    model: Annotated[Path, typer.Argument(help="The .model file.")],
    inputs: Inputs,
    include: Include = [],  # noqa: B006
    text_field: TextField = "text",
    id_field: IdField = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Of the training; only what it held out is read. 0: everything.")
    ] = 0.0,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Most to read; a sample is drawn from more.")
    ] = EVAL_BYTES,
    seed: Seed = 0,
) -> None:
    """Report bytes per token on held-out text, and that the text comes back exactly."""
    check_fraction(validation_fraction)
    chosen = Tokenizer.load(model)
    left_out = Reasons()
    text_bytes = tokens = fallback = documents = 0
    byte_ids = {i for i in range(chosen.vocab_size) if chosen.is_byte(i)}
    with tempfile.TemporaryDirectory() as folder:
        units = _units(inputs, include, Reading(text_field, id_field), Path(folder))
        read = sample_units(units, max_bytes, seed)

        def wanted(name: str) -> bool:
            return not validation_fraction or held_out(name, validation_fraction, seed)

        for text in _texts(read, "encoding", wanted, left_out):
            ids = chosen.encode(text)
            if chosen.decode(ids) != text:
                raise RuntimeError(f"{model} does not give back the text that begins {text[:40]!r}")
            documents += 1
            text_bytes += len(text.encode("utf-8"))
            tokens += len(ids)
            fallback += sum(i in byte_ids for i in ids)
    if not tokens:
        raise ValueError("no text to evaluate on: got no readable document; check the inputs")
    print(
        f"{model}: {text_bytes / tokens:.4f} bytes/token, {tokens} tokens, {text_bytes} bytes, "
        f"{documents} documents; {fallback / tokens:.3%} of tokens are single bytes; every text "
        f"came back exactly; sha256 {chosen.sha256}"
    )
    _print_left_out(left_out, read, units)


def _units(
    inputs: Sequence[str], include: Sequence[str], reading: Reading, folder: Path
) -> list[Unit]:
    """The units of all inputs; standard input goes to a file in `folder`."""
    files = [name for name in inputs if name != STDIN_INPUT]
    found = list_files(files, include) if files else []
    if len(files) < len(inputs):
        found.append(spool_stdin(folder / "stdin.jsonl"))
    return make_units(found, UNIT_BYTES, reading)


def _texts(
    units: Sequence[Unit], label: str, wanted: Callable[[str], bool], left_out: Reasons
) -> Iterator[str]:
    """Texts of the wanted documents; a long one in parts, as if each were a document."""
    with stage(label, sum(unit.size for unit in units)) as progress:
        for unit in units:
            documents = 0
            for document in read_documents(unit):
                if isinstance(document, Skipped):
                    left_out.add(document.reason, document.name)
                # A long document may be named at its end only; its first name decides here.
                elif wanted(document.name):
                    documents += 1
                    try:
                        yield from document.parts
                    except Unreadable as error:
                        left_out.add(str(error), document.name)
                else:
                    left_out.add(OTHER_SPLIT, document.name)
            progress.advance(unit.size, documents)


def _print_left_out(left_out: Reasons, read: Sequence[Unit], units: Sequence[Unit]) -> None:
    if count := sum(left_out.counts.values()):
        print(f"{count} documents left out")
        for reason, number in left_out.counts.items():
            print(f"  {number}, {reason}: {', '.join(left_out.examples[reason])}")
    if len(read) < len(units):
        sizes = [sum(unit.size for unit in part) for part in (read, units)]
        print(f"a sample was read: {sizes[0]} of {sizes[1]} bytes")
