"""How fast training rows come from disk: read, checked, decoded, cut, stacked."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import numpy as np

from data_prep.shards import read_manifest
from data_prep.training_rows import TrainingRows


def bench(
    dataset: Path,
    split: str,
    *,
    seq_len: int | None,
    threads: int,
    batch_rows: int,
    seconds: float,
) -> str:
    """Read batches of shuffled rows for some seconds, epoch after epoch; one line of rates.

    Shards are checked against their hashes before the clock starts, as the first epoch of a run
    does while it reads.
    """
    row_tokens = read_manifest(dataset).row_tokens
    seq_len = row_tokens if seq_len is None else seq_len
    if seq_len < 2 or row_tokens % seq_len:
        raise ValueError(
            f"seq-len does not divide the rows of {dataset}: got {seq_len}; expected a divisor of "
            f"{row_tokens}"
        )
    rows = TrainingRows(dataset, split, seq_len)
    began = time.perf_counter()
    for problem in rows.rows.problems():
        raise ValueError(problem)
    checked = time.perf_counter() - began

    def read(batch: int) -> int:
        positions = range(batch * batch_rows, (batch + 1) * batch_rows)
        chosen = [
            rows[int(rows.epoch_order(0, position // len(rows))[position % len(rows)])]
            for position in positions
        ]
        tokens = np.stack([row.tokens for row in chosen])
        labels = np.stack([row.labels for row in chosen])
        return min(tokens.size, labels.size)

    batches = count()
    tokens = 0
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        ahead = deque(pool.submit(read, batch) for batch in islice(batches, 2 * threads))
        while time.perf_counter() - began < seconds:
            tokens += ahead.popleft().result()
            ahead.append(pool.submit(read, next(batches)))
        elapsed = time.perf_counter() - began
    megabytes = sum(rows.rows.shard_bytes) / 1e6
    return (
        f"{dataset}/{split}: {tokens / elapsed / 1e6:.1f} M tokens/s at seq_len {seq_len}, "
        f"{threads} threads, batches of {batch_rows} rows; hashes of {megabytes:.0f} MB checked at "
        f"{megabytes / max(checked, 1e-9):.0f} MB/s"
    )
