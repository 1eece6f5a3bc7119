"""Multi-query associative recall: accuracy at the query positions.

The rows, both published variants of them, are those of data_prep/mqar.py: a row lists key-value
pairs and later asks for each key once; the target is the key's value and is predicted AT the
query's own position, so nothing is shifted:

    tokens   k1 v1 k2 v2  .  k2  .  .  k1  .           .  filler
    labels    -  -  -  -  -  v2  -  -  v1  -           -  -100, not scored

Metrics: eval/synthetic_rows.py, with `pairs` labels in a row. Chance is about 2 / vocab_size once a
model knows that a value comes. One trained model says little: report several seeds
(`python -m pretrain sweep`).
"""

from __future__ import annotations

from functools import partial
from typing import cast

from data_prep.mqar import MQAR_VARIANTS, VOCAB_SIZE, MqarTask, MqarVariant
from eval import synthetic_rows
from eval.result import Options, Subject


def _draw(subject: Subject, options: Options, length: int, pairs: int) -> MqarTask:
    variant = cast("MqarVariant", options.variant or MQAR_VARIANTS[0])
    own = min(VOCAB_SIZE.get(variant, 0), subject.vocab_size // 2 * 2)
    return MqarTask(
        seq_len=length,
        pairs=pairs,
        vocab_size=own if options.task_vocab_size is None else options.task_vocab_size,
        variant=variant,
    )


KIND = synthetic_rows.Kind("mqar", "pairs", _draw)
check = partial(synthetic_rows.check, KIND)
mqar = partial(synthetic_rows.run, KIND)
