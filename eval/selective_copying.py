"""Selective copying: are the tokens that matter repeated, in order?

The rows, both published variants of them, are those of data_prep/selective_copy.py. Metrics:
eval/synthetic_rows.py, with `copied` labels in a row. Which of token and whole-sequence accuracy
the Mamba paper reports is an open question (state-spaces/mamba#925), so both are here.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from data_prep.selective_copy import COPY_VARIANTS, VOCAB_SIZE, CopyVariant, SelectiveCopyTask
from eval import synthetic_rows
from eval.result import Options, Subject


def _draw(subject: Subject, options: Options, length: int, copied: int) -> SelectiveCopyTask:
    variant = cast("CopyVariant", options.variant or COPY_VARIANTS[0])
    own = min(VOCAB_SIZE.get(variant, 0), subject.vocab_size)
    return SelectiveCopyTask(
        seq_len=length,
        copied=copied,
        vocab_size=own if options.task_vocab_size is None else options.task_vocab_size,
        variant=variant,
    )


KIND = synthetic_rows.Kind("selective-copy", "copied", _draw)
check = partial(synthetic_rows.check, KIND)
selective_copying = partial(synthetic_rows.run, KIND)
