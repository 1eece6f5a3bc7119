"""What a task receives (`Subject`, `Options`) and what it returns (`Result`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.tokenizer import Tokenizer
from models.config import extension_advice
from models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One number with everything needed to compare it. Different `version` or `settings`: not
    the same measurement."""

    task: str
    """Name in `eval.task.TASKS`."""
    version: int
    """Raised whenever the definition changes, so that old and new numbers never share a table."""
    metric: str
    value: float
    unit: str
    count: int
    """Number of things the value is a mean over; `unit` and the task's docstring say which."""
    standard_error: float | None
    """In the value's unit; None where it cannot be estimated (one document, one row)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Everything that changes the value: files, window, stride, BOS policy, lengths, seed."""


def mean_result(
    task: str,
    version: int,
    metric: str,
    values: np.ndarray,
    unit: str,
    settings: dict[str, Any],
) -> Result:
    """The mean of independent `values` [n] with its standard error, std / sqrt(n)."""
    n = len(values)
    return Result(
        task=task,
        version=version,
        metric=metric,
        value=float(values.mean()),
        unit=unit,
        count=n,
        standard_error=None if n < 2 else float(values.std(ddof=1)) / math.sqrt(n),
        settings=settings,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model under test, loaded."""

    model: LanguageModel
    vocab_size: int
    max_seq_len: int
    """Tokens; the model's level weights end here, so longer input is refused, never scored as
    zero."""
    tokenizer: Tokenizer | None
    device: str

    def need_tokenizer(self, task: str) -> Tokenizer:
        """The tokenizer, or a ValueError that says what is missing."""
        if self.tokenizer is None:
            raise ValueError(
                f"task {task} reads text: got a model directory without tokenizer.model; expected "
                "one beside config.json; copy the tokenizer that the model was trained with there"
            )
        return self.tokenizer

    def check_length(self, what: str, tokens: int) -> None:
        """Refuse input that is longer than the model's number of levels allows."""
        if tokens > self.max_seq_len:
            raise ValueError(
                f"{what} is longer than the model: got {tokens} tokens; expected at most the "
                f"model's max_seq_len {self.max_seq_len}; use a smaller length"
                f"{extension_advice(tokens)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asked for; every task picks what it needs and refuses when that is missing."""

    texts: tuple[Path, ...] = ()
    dataset: Path | None = None
    split: str = "validation"
    wikitext: Path | None = None
    window: int | None = None
    """Tokens a forward pass reads; None means the model's max_seq_len."""
    stride: int | None = None
    """New tokens a window scores after the first; None means the window: disjoint windows."""
    lengths: tuple[int, ...] = ()
    """NIAH budgets in tokens, prompt and answer together; empty means the model's max_seq_len."""
    samples: int = 200
    """NIAH samples per length; below 200 the standard error hides most differences."""
    answer_tokens: int = 128
    """Tokens a NIAH answer may take, part of the length; 128 is RULER's."""
    seed: int = 0
    batch_tokens: int = 8192
    """Tokens per forward pass; changes speed and memory, not results."""
