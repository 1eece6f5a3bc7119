"""`python -m models export` and `import`: a model into and out of other people's formats."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from models.export import Dtype, Format, Result, export
from models.import_model import ImportFormat, import_model
from models.proof import ProofError
from models.tensor_files import MAX_SHARD_BYTES


def register(app: typer.Typer) -> None:
    """Adds the commands to `python -m models`."""
    app.command(name="export")(export_command)
    app.command(name="import")(import_command)


def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a step folder or a model directory.")],
    output: Annotated[Path, typer.Argument(help="A folder to make.")],
    format: Annotated[Format, typer.Option(help="What to write.")] = "fenwick",  # noqa: A002
    dtype: Annotated[Dtype, typer.Option(help="Of the matrices; gates stay fp32.")] = "fp32",
    max_shard_bytes: Annotated[
        int, typer.Option(help="Larger weights are cut into shards of this size.")
    ] = MAX_SHARD_BYTES,
) -> None:
    """Write a model into a folder of its own, and prove it by comparing logits."""
    try:
        result = export(
            checkpoint, output, format=format, dtype=dtype, max_shard_bytes=max_shard_bytes
        )
    except ProofError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    _report(output, result)


def import_command(
    checkpoint: Annotated[Path, typer.Argument(help="A folder with config.json and weights.")],
    output: Annotated[Path, typer.Argument(help="A model directory to make.")],
    source_format: Annotated[
        ImportFormat,
        typer.Option("--from", help="Whose folder it is; huggingface: an export of ours."),
    ] = "huggingface",
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest document, for models of others without levels.")
    ] = None,
    max_shard_bytes: Annotated[
        int, typer.Option(help="Larger weights are cut into shards of this size.")
    ] = MAX_SHARD_BYTES,
) -> None:
    """Make a model directory of an exported folder or of another code base's checkpoint."""
    try:
        result = import_model(
            checkpoint,
            output,
            source_format,
            max_seq_len=max_seq_len,
            max_shard_bytes=max_shard_bytes,
        )
    except ProofError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if result.complete_before:
        print(f"{output} is complete: nothing to do")
        return
    if result.note:
        print(f"note: {result.note}")
    print(f"wrote {output}: {result.tensors} tensors, every one equal to its source bit by bit")


def _report(output: Path, result: Result) -> None:
    if result.complete_before:
        print(f"{output} is complete: nothing to do")
        return
    if result.rounding:
        print(f"rounding to bf16 moves the logits of the sample by at most {result.rounding:.3g}")
    print(
        f"wrote {output}: logits on {result.tokens} sample tokens differ from the source's by at "
        f"most {result.max_difference:.3g}"
    )
