"""Data sets of rows that a test makes up."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.dataset_folder import building, publish
from data_prep.shards import Manifest, ShardWriter, SplitFacts

VOCAB_SIZE = 1000


def publish_rows(
    folder: Path,
    rows: Iterable[tuple[np.ndarray, np.ndarray]],
    row_tokens: int,
    shard_bytes: int,
) -> Path:
    """A data set of these (tokens, document starts), all for training; returns its folder."""
    with building(folder) as work:
        writer = ShardWriter(
            work / "train", row_tokens=row_tokens, vocab_size=VOCAB_SIZE, shard_bytes=shard_bytes
        )
        count = 0
        for tokens, starts in rows:
            writer.write(tokens, starts)
            count += 1
        facts = SplitFacts(
            rows=count,
            tokens=count * row_tokens,
            documents=count,
            bytes=0,
            dropped_tokens={},
            index_sha256=writer.finish(),
        )
        manifest = Manifest(
            kind="text",
            tokenizer_sha256=None,
            vocab_size=VOCAB_SIZE,
            row_tokens=row_tokens,
            dtype="uint16",
            splits={"train": facts},
            documents_in=count,
            skipped={},
            inputs=[],
            settings={},
            seed=0,
        )
        publish(folder, manifest, tokenizer_model=None)
    return folder
