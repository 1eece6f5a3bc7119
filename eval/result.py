"""What a task receives (`Subject`, `Options`) and what it returns (`Result`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.tokenizer import Tokenizer
from eval.samples import SampleStore
from eval.scoring import Model
from models.config import extension_advice


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

    model: Model
    vocab_size: int
    max_seq_len: int
    """Tokens; the model's level weights end here, so longer input is refused, never scored as
    zero."""
    tokenizer: Tokenizer | None
    device: str
    trained_length: int | None = None
    """Tokens of the longest rows the model was trained on; None: max_seq_len."""
    beyond_trained: bool = False
    """Whether the user asked for input longer than that; such results are marked."""
    samples: SampleStore = SampleStore()

    @property
    def usual_length(self) -> int:
        """The longest input that is scored without being asked for."""
        return min(self.max_seq_len, self.trained_length or self.max_seq_len)

    def need_tokenizer(self, task: str) -> Tokenizer:
        """The tokenizer, or a ValueError that says what is missing."""
        if self.tokenizer is None:
            raise ValueError(
                f"task {task} reads text: got a model directory without tokenizer.model; expected "
                "one beside config.json; copy the tokenizer that the model was trained with there"
            )
        return self.tokenizer

    def check_length(self, what: str, tokens: int) -> None:
        """Refuse input that is longer than the model's number of levels allows, and, unless asked
        for, than the rows it was trained on."""
        if tokens > self.max_seq_len:
            raise ValueError(
                f"{what} is longer than the model: got {tokens} tokens; expected at most the "
                f"model's max_seq_len {self.max_seq_len}; use a smaller length"
                f"{extension_advice(tokens)}"
            )
        if tokens > self.usual_length and not self.beyond_trained:
            raise ValueError(
                f"{what} is longer than the rows the model was trained on: got {tokens} tokens; "
                f"expected at most {self.usual_length}; use a smaller length, or --beyond-trained "
                "to score it all the same"
            )

    def length_mark(self, tokens: int) -> dict[str, int]:
        """For a result's settings: {"trained_length": n} where the input is longer than that."""
        return {"trained_length": self.usual_length} if tokens > self.usual_length else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asked for; every task picks what it needs and refuses when that is missing."""

    texts: tuple[Path, ...] = ()
    dataset: Path | None = None
    split: str = "validation"
    wikitext: Path | None = None
    wikitext_download: str | None = None
    """NAME:SPLIT of the hub's Salesforce/wikitext, instead of a file."""
    window: int | None = None
    """Tokens a forward pass reads; None means the length the model was trained on."""
    stride: int | None = None
    """New tokens a window scores after the first; None means the window: disjoint windows."""
    lengths: tuple[int, ...] = ()
    """Tokens of NIAH prompts with their answers, of rows, of blocks; empty means the length the
    model was trained on."""
    samples: int = 200
    """NIAH samples per length, rows drawn for MQAR and selective copying, most blocks of
    loss-by-position; below 200 the standard error hides most differences."""
    answer_tokens: int = 128
    """Tokens a NIAH answer may take, part of the length; 128 is RULER's."""
    niah_tasks: tuple[str, ...] = ()
    """RULER's names without "niah_"; empty means all that the haystack allows."""
    haystack: Path | None = None
    """Text that NIAH hides its needles in."""
    pairs: tuple[int, ...] = ()
    """Pairs of MQAR and tokens to copy, for rows that are drawn instead of read from `dataset`."""
    variant: str | None = None
    """Which form of MQAR or of selective copying is drawn; None means the first."""
    task_vocab_size: int | None = None
    """Ids of drawn rows; None means the variant's own, or the model's for Zoology's MQAR."""
    seed: int = 0
    batch_tokens: int = 8192
    """Tokens per forward pass; changes speed and memory, not results."""
    limit: int | None = None
    """lm-eval: documents of a task; None means all."""
    fewshot: int | None = None
    """lm-eval: examples before each question; None means the task's own."""
