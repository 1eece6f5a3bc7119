"""The table of tasks. To add one: write eval/<task>.py, add its line here, test it in
tests/eval/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eval import mqar, niah, perplexity, wikitext
from eval.result import Options, Result, Subject


@dataclass(frozen=True, slots=True)
class Task:
    """`check` refuses (ValueError, OSError) all that `run` cannot do, before any task runs and
    without writing anything; `run` may count on it."""

    check: Callable[[Subject, Options], None]
    run: Callable[[Subject, Options], list[Result]]


TASKS = {
    "perplexity": Task(perplexity.check, perplexity.perplexity),
    "wikitext": Task(wikitext.check, wikitext.wikitext),
    "niah": Task(niah.check, niah.niah),
    "mqar": Task(mqar.check, mqar.mqar),
}
