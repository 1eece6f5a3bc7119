"""Batches whose content is a function of the step.

Every packed row is cut into training rows of seq_len tokens. The run reads one endless sequence of
them, the permutations of epoch 0, 1, 2, ... one after the other, and every update takes the next
R = batch_tokens / seq_len rows of it (fewer, or cut shorter, in batch.stages: batch_plan.py):

    sequence   | permutation of epoch 0       | permutation of epoch 1       | ...
    update     |   0   |   1   |   2   |   3     |   4   |   5   |
    rank       |r0 | r1|r0 | r1| ...     R / ranks rows each, cut into micro-batches

So the position in the data is the step and nothing else has to be stored, a resumed run reads
exactly what an unbroken one would, and the rows of an update do not depend on the number of ranks.
Which rows an epoch has, and in which order, is data_prep/training_rows.py's.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from data_prep.shards import IGNORED_LABEL, Row, Rows
from data_prep.training_rows import MixedRows, TrainingRows
from pretrain.batch_plan import BatchPlan
from pretrain.config import DataConfig, RunConfig
from pretrain.errors import TrainingFailed


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass.

    tokens, labels: [B, T] int64; labels[b, t] is what logits[b, t] has to predict, or -100.
    cu_seqlens: [N+1] int64 on the CPU, document starts in the flattened B * T tokens and B * T at
        the end; None when
        every row is one document.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor | None

    @property
    def valid_tokens(self) -> int:
        """Labels that count in the loss."""
        return int((self.labels != IGNORED_LABEL).sum())

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with tokens and labels on `device`."""
        tokens, labels = self.tokens, self.labels
        if device.type == "cuda":
            # From other memory, a copy makes the host wait for all that the GPU was given.
            tokens, labels = (
                x.pin_memory().to(device, non_blocking=True) for x in (tokens, labels)
            )
        return MicroBatch(tokens, labels, self.cu_seqlens)


AnyRows = TrainingRows | MixedRows


def training_rows(data: DataConfig) -> AnyRows:
    """The rows that a run trains on: of data.dataset, or of several data sets by weight.

    Raises:
        FileNotFoundError, ValueError: they cannot be read; with data.damaged_shards=skip, not one
            shard of a data set can.
    """

    def rows_of(dataset: Path) -> TrainingRows:
        rows = TrainingRows(
            dataset,
            "train",
            data.seq_len,
            shuffle_shards=data.shuffle_shards,
            damaged=data.damaged_shards,
        )
        if data.damaged_shards == "skip":
            _refuse_unreadable(rows.rows)
        return rows

    if not data.mixed_with:
        return rows_of(data.dataset)
    others = [(rows_of(other.dataset), other.weight) for other in data.mixed_with]
    return MixedRows([(rows_of(data.dataset), data.weight), *others])


def _refuse_unreadable(rows: Rows) -> None:
    """ValueError where every shard is missing or damaged."""
    error: Exception | None = None
    for end in rows.shard_ends.tolist():
        try:
            rows[end - 1]
        except (ValueError, OSError) as caught:
            error = error or caught
        else:
            return
    raise ValueError(
        f"no training shard of {rows.dataset} can be read: {error}; "
        "data.damaged_shards=skip needs one that can"
    )


def rows_between(first: int, count: int, rows: AnyRows, shuffle_seed: int) -> list[int]:
    """Training rows at positions first..first+count-1 of the endless sequence, in order."""
    epoch_rows = len(rows)
    return [
        int(rows.epoch_order(shuffle_seed, position // epoch_rows)[position % epoch_rows])
        for position in range(first, first + count)
    ]


def cut(row: Row, seq_len: int) -> list[Row]:
    """A row as rows of seq_len tokens; a document that is cut goes on as one of its own."""
    if len(row.tokens) == seq_len:
        return [row]
    pieces = []
    for begin in range(0, len(row.tokens), seq_len):
        end = begin + seq_len
        inside = row.document_starts[(row.document_starts > begin) & (row.document_starts < end)]
        starts = np.concatenate([[0], inside - begin]).astype(np.int64)
        pieces.append(Row(row.tokens[begin:end], row.labels[begin:end], starts))
    return pieces


def collate(rows: Sequence[Row]) -> MicroBatch:
    """Stacks rows of equal length and joins their document starts."""
    T = len(rows[0].tokens)
    starts = [torch.from_numpy(row.document_starts + b * T) for b, row in enumerate(rows)]
    packed = any(len(row.document_starts) > 1 for row in rows)
    end = torch.tensor([len(rows) * T])
    return MicroBatch(
        tokens=torch.stack([torch.from_numpy(row.tokens) for row in rows]),
        labels=torch.stack([torch.from_numpy(row.labels) for row in rows]),
        cu_seqlens=torch.cat([*starts, end]) if packed else None,
    )


def training_batches(
    rows: AnyRows, config: RunConfig, rank: int, world_size: int, first_update: int
) -> Iterator[list[MicroBatch]]:
    """This rank's micro-batches of every update from `first_update` (counted from 0) to the end.

    Raises:
        TrainingFailed: a shard is missing or damaged.
    """
    plan = BatchPlan(config)
    size = config.batch.micro_batch_rows

    def read(update: int) -> list[MicroBatch]:
        stage, first = plan.stage(update + 1), plan.first_row(update + 1)
        order = rows_between(first, stage.rows, rows, config.data.shuffle_seed)
        rank_rows = stage.rows // world_size
        mine = order[rank * rank_rows : (rank + 1) * rank_rows]
        return [
            collate(
                [row for i in mine[begin : begin + size] for row in cut(rows[i], stage.seq_len)]
            )
            for begin in range(0, rank_rows, size)
        ]

    updates = iter(range(first_update, config.training.total_steps))
    ahead = config.data.loader_threads
    try:
        if ahead == 0:
            yield from map(read, updates)
            return
        with ThreadPoolExecutor(ahead) as pool:
            reading = deque(pool.submit(read, update) for update in islice(updates, ahead))
            while reading:
                batches = reading.popleft().result()
                reading.extend(pool.submit(read, update) for update in islice(updates, 1))
                yield batches
    except (ValueError, OSError) as error:
        raise TrainingFailed(f"rows cannot be read: {error}") from error


def validation_batches(
    rows: TrainingRows, config: RunConfig, rank: int, world_size: int
) -> Iterator[MicroBatch]:
    """This rank's share of validation.rows rows, spread evenly over the split.

    Every rank gets equally many micro-batches: ZeRO-3 gathers parameters in every forward pass with
    all ranks taking part. A rank whose rows have run out gets a row without a label that counts.
    """
    wanted = min(config.validation.rows, len(rows))
    size = config.batch.micro_batch_rows
    mine = [i * len(rows) // wanted for i in range(rank, wanted, world_size)]
    for i in range(math.ceil(wanted / (world_size * size))):
        chosen = mine[i * size : (i + 1) * size]
        if chosen:
            yield collate([rows[index] for index in chosen])
        else:
            filler = collate([rows[0]])
            yield replace(filler, labels=torch.full_like(filler.labels, IGNORED_LABEL))
