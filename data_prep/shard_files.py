"""One shard of packed rows, written by one task; equal rows give equal bytes.

WORK/SPLIT/shard.NNNNN.mds       the rows
WORK/SPLIT.facts/NNNNN.npz       what the index and the manifest need of it; written last
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.dataset_folder import write_atomically
from data_prep.mds_shard import write_mds_shard
from data_prep.pack import Run, read_rows
from data_prep.shards import INDEX_NAME, ROW_LENGTHS_NAME, token_dtype
from data_prep.unit_files import UnitCounts


@dataclass(frozen=True)
class ShardTools:
    """What every shard of a run shares."""

    row_tokens: int
    vocab_size: int
    token_bytes: np.ndarray  # [vocab_size] UTF-8 bytes of each token


@dataclass(frozen=True)
class ShardJob:
    """Rows [first_row, first_row + rows) of a split's stream; `runs` are those it needs."""

    folder: str
    facts: str
    number: int
    first_row: int
    rows: int
    runs: tuple[Run, ...]

    @property
    def shard(self) -> Path:
        return Path(self.folder) / f"shard.{self.number:05d}.mds"

    @property
    def is_done(self) -> bool:
        # A run killed while it published has facts of a shard that is elsewhere by now.
        return Path(self.facts).exists() and self.shard.exists()


@dataclass(frozen=True)
class SplitTotals:
    """Sums over the shards of a split."""

    documents: int
    repeats: int
    text_bytes: int
    row_lengths: np.ndarray


def write_shard(tools: ShardTools, job: ShardJob) -> UnitCounts:
    """Write the shard, then its facts; OSError where that fails."""
    rows = read_rows(
        job.runs, job.first_row, job.rows, tools.row_tokens, token_dtype(tools.vocab_size)
    )
    borders = np.searchsorted(rows.begins, np.arange(job.rows + 1) * tools.row_tokens)
    starts = []
    for n in range(job.rows):
        inside = rows.begins[borders[n] : borders[n + 1]] - n * tools.row_tokens
        starts.append(np.union1d([0], inside))
    entry = write_mds_shard(job.shard, rows.tokens, starts)
    record = {
        "entry": entry,
        "documents": rows.firsts,
        "repeats": len(rows.begins) - rows.firsts,
        "text_bytes": int(tools.token_bytes[rows.tokens].sum()),
    }
    buffer = io.BytesIO()
    np.savez(
        buffer,
        record=np.frombuffer(json.dumps(record).encode(), np.uint8),
        row_lengths=rows.longest,
    )
    write_atomically(Path(job.facts), buffer.getvalue())
    return UnitCounts(len(rows.begins), rows.tokens.size)


def write_index(folder: Path, facts: Sequence[Path]) -> SplitTotals:
    """Join the shards to a split: index.json, as streaming's own writer has it, and row lengths."""
    entries, row_lengths = [], []
    documents = repeats = text_bytes = 0
    for path in facts:
        with np.load(path, allow_pickle=False) as arrays:
            record = json.loads(arrays["record"].tobytes())
            row_lengths.append(arrays["row_lengths"])
        entries.append(record["entry"])
        documents += record["documents"]
        repeats += record["repeats"]
        text_bytes += record["text_bytes"]
    index = json.dumps({"shards": entries, "version": 2}, sort_keys=True)
    write_atomically(folder / INDEX_NAME, index.encode())
    lengths = np.concatenate(row_lengths)
    buffer = io.BytesIO()
    np.save(buffer, lengths)
    write_atomically(folder / ROW_LENGTHS_NAME, buffer.getvalue())
    return SplitTotals(documents, repeats, text_bytes, lengths)
