"""Lengths of documents: counts by powers of two, as text and as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.dataset_folder import write_atomically
from data_prep.pack import bucket_of
from data_prep.shards import Manifest
from data_prep.unit_files import UnitTable

BAR_WIDTH = 40


def length_counts(
    tables: Sequence[UnitTable], copies: Sequence[np.ndarray], split: int
) -> tuple[list[int], list[int]]:
    """(documents, tokens) by floor(log2(tokens)) of all that is chosen for a split, copies too."""
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    for table, used in zip(tables, copies, strict=True):
        mine = table.column("splits") == split
        lengths, counts = table.column("lengths")[mine], used[mine].astype(np.int64)
        buckets = bucket_of(lengths)
        np.add.at(documents, buckets, counts)
        np.add.at(tokens, buckets, counts * lengths)
    last = int(np.flatnonzero(documents).max(initial=-1)) + 1
    return documents[:last].tolist(), tokens[:last].tolist()


def histogram(documents: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """One line per power of two: range, documents, share of the tokens, bar of the share."""
    total = max(sum(tokens), 1)
    first = next((n for n, count in enumerate(documents) if count), len(documents))
    lines = [f"{'tokens':>20}  {'documents':>10}  of tokens"]
    for bucket in range(first, len(documents)):
        share = tokens[bucket] / total
        bar = "#" * round(BAR_WIDTH * share)
        span = f"{1 << bucket} to {(2 << bucket) - 1}"
        lines.append(f"{span:>20}  {documents[bucket]:>10,}  {share:>7.1%}  {bar}".rstrip())
    return lines


def write_length_plot(manifest: Manifest, path: Path) -> None:
    """The same histogram of every split as a PNG."""
    from matplotlib.figure import Figure  # late: it takes a second

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    splits = manifest.splits.items()
    longest = max((len(facts.length_documents) for _, facts in splits), default=0)
    width = 0.8 / max(len(manifest.splits), 1)
    for n, (name, facts) in enumerate(splits):
        places = np.arange(len(facts.length_documents)) + n * width
        above.bar(places, facts.length_documents, width, label=name, align="edge")
        tokens = np.array(facts.length_tokens, float)
        below.bar(places, tokens / max(tokens.sum(), 1), width, align="edge")
    above.set_ylabel("documents")
    above.set_yscale("symlog")
    above.legend()
    below.set_ylabel("share of tokens")
    below.set_xlabel("document length in tokens (bos and eos included)")
    ticks = [n for n in range(longest + 1) if n % 2 == 0]
    below.set_xticks(ticks, [_short(1 << n) for n in ticks])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def _short(number: int) -> str:
    for size, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)
