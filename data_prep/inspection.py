"""What `python -m data_prep inspect` shows: counts, lengths of documents, samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_prep.shards import IGNORED_LABEL, Manifest, Row, Rows, read_manifest, read_tokenizer
from data_prep.tokenizer import Tokenizer

BAR_WIDTH = 40
SAMPLE_TOKENS = 96


def inspect(dataset: Path, console: Console, *, split: str, samples: int, scan_rows: int) -> None:
    """Print the data set's facts, a histogram over its first rows and decoded samples.

    Raises FileNotFoundError or ValueError if it, or a shard that is read, is not what was written.
    """
    manifest = read_manifest(dataset)
    rows = Rows(dataset, split)
    _print_counts(dataset, manifest, console)
    tokenizer = read_tokenizer(dataset) if manifest.tokenizer_sha256 else None
    if tokenizer is not None:
        scanned = min(len(rows), scan_rows)
        lengths = document_lengths((rows[i] for i in range(scanned)), tokenizer)
        console.print(f"\ndocument length in tokens, first {scanned} rows of {split}")
        for line in histogram(lengths):
            console.print(line, markup=False, highlight=False)
    for index in np.linspace(0, len(rows) - 1, min(samples, len(rows)), dtype=int):
        console.print(f"\n[bold]{split} row {index}[/bold]", highlight=False)
        line = (
            _text_sample(rows[int(index)], tokenizer)
            if tokenizer is not None
            else _task_sample(rows[int(index)])
        )
        console.print(escape(line), highlight=False, soft_wrap=True)


def document_lengths(rows: Iterable[Row], tokenizer: Tokenizer) -> np.ndarray:
    """Tokens, bos and eos included, of each document that is whole in these consecutive rows.

    The first row must begin with a document, as row 0 does.
    """
    stream = np.concatenate([row.tokens for row in rows])
    begins = np.flatnonzero(stream == tokenizer.bos_id)
    ends = np.flatnonzero(stream == tokenizer.eos_id)
    complete = min(len(begins), len(ends))
    return ends[:complete] - begins[:complete] + 1


def histogram(lengths: np.ndarray) -> list[str]:
    """One line per power of two: range, count, bar."""
    if not len(lengths):
        return ["  no complete document in these rows"]
    buckets = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(buckets)
    first = int(buckets.min())
    lines = []
    for bucket in range(first, len(counts)):
        bar = "#" * int(np.ceil(BAR_WIDTH * counts[bucket] / counts.max()))
        lines.append(f"{1 << bucket:>9} to {(2 << bucket) - 1:<9} {counts[bucket]:>9}  {bar}")
    lines.append(
        f"  {len(lengths)} documents, median {int(np.median(lengths))}, "
        f"mean {lengths.mean():.0f}, longest {lengths.max()}"
    )
    return lines


def _print_counts(dataset: Path, manifest: Manifest, console: Console) -> None:
    table = Table(
        title=f"{dataset}: {manifest.kind}, rows of {manifest.row_tokens} tokens, "
        f"vocabulary {manifest.vocab_size}"
    )
    for column in ("split", "rows", "tokens", "documents", "MB of text", "bytes/token", "tail"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, facts in manifest.splits.items():
        table.add_row(
            name,
            f"{facts.rows:,}",
            f"{facts.tokens:,}",
            f"{facts.documents:,}",
            f"{facts.bytes / 1e6:.2f}" if facts.bytes else "-",
            f"{facts.bytes / facts.tokens:.2f}" if facts.bytes else "-",
            f"{sum(facts.dropped_tokens.values()):,}",
        )
    console.print(table)
    written = sum(facts.documents for facts in manifest.splits.values())
    skipped = sum(entry.count for entry in manifest.skipped.values())
    console.print(
        f"documents: {manifest.documents_in} in = {written} written + {skipped} skipped",
        soft_wrap=True,
    )
    for reason, entry in manifest.skipped.items():
        names = ", ".join(entry.examples)
        console.print(
            f"  {entry.count} {reason}: {names}", markup=False, highlight=False, soft_wrap=True
        )
    if manifest.tokenizer_sha256:
        console.print(f"tokenizer sha256 {manifest.tokenizer_sha256}", soft_wrap=True)


def _text_sample(row: Row, tokenizer: Tokenizer) -> str:
    """The beginning of a row; documents that begin in it are marked."""
    starts = set(row.document_starts.tolist())
    parts = []
    for position, token in enumerate(row.tokens[:SAMPLE_TOKENS].tolist()):
        if position in starts and token == tokenizer.bos_id:
            parts.append(b"<document>")
        else:
            parts.append(tokenizer.piece_bytes(token))
    return b"".join(parts).decode("utf-8", errors="replace")


def _task_sample(row: Row) -> str:
    """Token ids; where a label is scored, `token>label`."""
    return " ".join(
        str(token) if label == IGNORED_LABEL else f"{token}>{label}"
        for token, label in zip(row.tokens.tolist(), row.labels.tolist(), strict=True)
    )
