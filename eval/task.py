"""The table of tasks. To add one: write eval/<task>.py, add its line here, test it in
tests/eval/."""

from __future__ import annotations

from collections.abc import Callable

from eval.mqar import mqar
from eval.niah import niah
from eval.perplexity import perplexity
from eval.result import Options, Result, Subject
from eval.wikitext import wikitext

TASKS: dict[str, Callable[[Subject, Options], list[Result]]] = {
    "perplexity": perplexity,
    "wikitext": wikitext,
    "niah": niah,
    "mqar": mqar,
}
