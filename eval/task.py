"""The table of tasks. To add one: write eval/<task>.py, add its line here, test it in
tests/eval/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from eval import (
    harness,
    loss_by_position,
    mqar,
    niah,
    perplexity,
    selective_copying,
    synthetic_rows,
    wikitext,
)
from eval.result import Options, Result, Subject


@dataclass(frozen=True, slots=True)
class Task:
    """`check` refuses (ValueError, OSError) all that `run` cannot do, before any task runs and
    without writing anything; `run` may count on it."""

    check: Callable[[Subject, Options], None]
    run: Callable[[Subject, Options], list[Result]]
    paired: tuple[str, ...] = ()
    """Values of a sample by which two models can be compared sample by sample."""


TASKS = {
    "perplexity": Task(perplexity.check, perplexity.perplexity, perplexity.PAIRED),
    "wikitext": Task(wikitext.check, wikitext.wikitext, wikitext.PAIRED),
    "niah": Task(niah.check, niah.niah, niah.PAIRED),
    "mqar": Task(mqar.check, mqar.mqar, synthetic_rows.PAIRED),
    "selective-copy": Task(
        selective_copying.check, selective_copying.selective_copying, synthetic_rows.PAIRED
    ),
    "loss-by-position": Task(
        loss_by_position.check, loss_by_position.loss_by_position, loss_by_position.PAIRED
    ),
}
NAMES = (*TASKS, f"{harness.PREFIX}NAME")


def find_task(name: str) -> Task:
    """The task of a name in TASKS, or of "lm-eval:NAME", a task of EleutherAI's harness.

    Raises:
        ValueError: there is no such task.
    """
    if name.startswith(harness.PREFIX) and name != harness.PREFIX:
        theirs = name.removeprefix(harness.PREFIX)
        return Task(partial(harness.check, theirs), partial(harness.run, theirs))
    if name not in TASKS:
        raise ValueError(
            f"unknown task: got {name}; expected some of {','.join(NAMES)}; correct --tasks"
        )
    return TASKS[name]
