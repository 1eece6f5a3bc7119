"""What `python -m data_prep inspect` shows: counts, lengths of documents, samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_prep.lengths import histogram
from data_prep.shards import IGNORED_LABEL, Manifest, Row, Rows, read_manifest, read_tokenizer
from data_prep.tokenizer import Tokenizer

SAMPLE_TOKENS = 96


def inspect(
    dataset: Path, console: Console, *, split: str, samples: int, at_least: Sequence[int]
) -> None:
    """Print the data set's facts, the lengths of its documents and decoded samples.

    Raises FileNotFoundError or ValueError if it, or a shard that is read, is not what was written.
    """
    manifest = read_manifest(dataset)
    rows = Rows(dataset, split)
    _print_counts(dataset, manifest, console)
    for line in reconciliation(manifest):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    tokenizer = read_tokenizer(dataset) if manifest.tokenizer_sha256 else None
    if tokenizer is not None:
        console.print(f"tokenizer sha256 {tokenizer.sha256}", soft_wrap=True)
    facts = manifest.splits[split]
    if facts.length_documents:
        console.print(f"\ndocument length in tokens, bos and eos included, {split}")
        for line in histogram(facts.length_documents, facts.length_tokens):
            console.print(line, markup=False, highlight=False)
    if (lengths := rows.row_lengths()) is not None:
        console.print(f"\nrows of {split} with a part of a document of at least so many tokens")
        for line in rows_by_length(lengths, at_least):
            console.print(line, markup=False, highlight=False)
    for index in np.linspace(0, len(rows) - 1, min(samples, len(rows)), dtype=int):
        console.print(f"\n[bold]{split} row {index}[/bold]", highlight=False)
        line = (
            _text_sample(rows[int(index)], tokenizer)
            if tokenizer is not None
            else _task_sample(rows[int(index)])
        )
        console.print(escape(line), highlight=False, soft_wrap=True)


def reconciliation(manifest: Manifest) -> list[str]:
    """Documents in = written + skipped, each reason with examples; what sources and weights did."""
    written = sum(facts.documents for facts in manifest.splits.values())
    skipped = sum(entry.count for entry in manifest.skipped.values())
    lines = [f"documents: {manifest.documents_in} in = {written} written + {skipped} skipped"]
    for reason, entry in manifest.skipped.items():
        lines.append(f"  skipped {entry.count}, {reason}: {', '.join(entry.examples)}")
    for reason, entry in manifest.overlapping.items():
        lines.append(f"  written though it {reason}, {entry.count}: {', '.join(entry.examples)}")
    if repeats := sum(facts.repeats for facts in manifest.splits.values()):
        lines.append(f"  written again by weight: {repeats}")
    if len(manifest.sources) > 1:
        total = max(sum(source.tokens for source in manifest.sources), 1)
        lines += [
            f"  source {source.name}: {source.documents} documents, {source.tokens} tokens = "
            f"{source.tokens / total:.2%}, each used {source.rate:.3g} times"
            for source in manifest.sources
        ]
    return lines


def rows_by_length(row_lengths: np.ndarray, at_least: Sequence[int]) -> list[str]:
    """One line a length: rows, share."""
    most = int(row_lengths.max(initial=1))
    wanted = list(at_least) or [1 << n for n in range(most.bit_length())]
    lines = []
    for tokens in wanted:
        count = int((row_lengths >= tokens).sum())
        lines.append(f"{tokens:>12,}  {count:>10,}  {count / len(row_lengths):>7.1%}")
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
