"""Log-likelihoods and greedy completions: the only place where a task touches a model.

Every target token is scored exactly once. A window is what one forward pass reads;
`rolling_windows` says which tokens it scores. Losses are natural logarithms computed in fp32 and
summed in float64 over tokens, never as a mean of batch means (a short last batch would bias that).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.shards import IGNORED_LABEL

# Positions whose losses are taken at a time: bounds the copy of the logits that log-softmax makes.
SLICE = 2048


class Model(Protocol):
    """What scoring needs of a model; models.language_model.LanguageModel has it."""

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """tokens [B, T] int64 -> logits [B, T, vocab_size] fp32."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """One forward pass: the last len(targets) positions of `inputs` predict `targets`."""

    inputs: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens, labels [B, T] int64, labels -100 where nothing is scored; cu_seqlens over B*T or
    None."""

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """One window or row: summed nats, number of scored tokens, how many of them were the argmax."""

    nll: float
    tokens: int
    hits: int

    def __add__(self, other: Score) -> Score:
        return Score(self.nll + other.nll, self.tokens + other.tokens, self.hits + other.hits)

    def values(self) -> dict[str, float | int]:
        """For a sample log; `Score(**values)` reads it back."""
        return asdict(self)


def check_stride(window: int, stride: int) -> None:
    """ValueError unless 1 <= stride <= window, both in tokens."""
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride does not fit the window: got {stride}; expected 1 <= stride <= window = "
            f"{window}; use a smaller --stride"
        )


def rolling_windows(
    tokens: Sequence[int], prefix: int, *, window: int, stride: int
) -> Iterator[Window]:
    """Windows that score each token of one document once, as lm-eval's rolling log-likelihood does.

    The first window reads `prefix` (BOS) and scores up to `window` tokens. Each later one scores
    the next `stride` tokens and reads the `window` tokens that end just before the last of them, so
    the last, shorter step still sees a full window. With stride = window, the windows before it are
    disjoint.

        window 4, stride 4, document a b c d e f g h i j:
        reads P a b c | d e f g | f g h i
        scores a b c d | e f g h |     i j

    Args:
        tokens: ids of one document, without BOS. Empty yields nothing. prefix: the id that stands
        before the first token. window: the most tokens a forward pass reads, >= 1. stride: 1 <=
        stride <= window; smaller gives each token more context and costs window / stride as much.
    """
    check_stride(window, stride)
    context = [prefix, *tokens]  # context[i] stands just before tokens[i]
    done = min(window, len(tokens))
    if done:
        yield Window(context[:done], tokens[:done])
    while done < len(tokens):
        end = min(done + stride, len(tokens))
        yield Window(context[end - window : end], tokens[done:end])
        done = end


def window_batches(windows: Iterable[Window], batch_tokens: int) -> Iterator[Batch]:
    """Groups windows, in order, padded on the right; a causal model cannot see padding that
    comes later."""
    group: list[Window] = []
    longest = 0
    for window in windows:
        longer = max(longest, len(window.inputs))
        if group and longer * (len(group) + 1) > batch_tokens:
            yield _pad(group, longest)
            group, longer = [], len(window.inputs)
        group.append(window)
        longest = longer
    if group:
        yield _pad(group, longest)


def _pad(group: list[Window], length: int) -> Batch:
    tokens = torch.zeros(len(group), length, dtype=torch.int64)
    labels = torch.full((len(group), length), IGNORED_LABEL, dtype=torch.int64)
    for row, window in enumerate(group):
        n = len(window.inputs)
        tokens[row, :n] = torch.as_tensor(window.inputs)
        labels[row, n - len(window.targets) : n] = torch.as_tensor(window.targets)
    return Batch(tokens, labels)


def row_batches(
    rows: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], batch_tokens: int
) -> Iterator[Batch]:
    """Groups rows (tokens [T], labels [T], document starts [n]) of one length T; documents stay
    apart."""
    group: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for row in rows:
        if group and len(row[0]) * (len(group) + 1) > batch_tokens:
            yield _stack(group)
            group = []
        group.append(row)
    if group:
        yield _stack(group)


def _stack(group: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Batch:
    T = len(group[0][0])
    tokens = torch.from_numpy(np.stack([row[0] for row in group]).astype(np.int64))
    labels = torch.from_numpy(np.stack([row[1] for row in group]).astype(np.int64))
    if all(len(row[2]) == 1 for row in group):
        return Batch(tokens, labels)  # each row is one document
    starts = [row[2].astype(np.int64) + i * T for i, row in enumerate(group)]
    cu_seqlens = np.concatenate([*starts, np.array([len(group) * T], dtype=np.int64)])
    return Batch(tokens, labels, torch.from_numpy(cu_seqlens))


@torch.no_grad()
def score(model: Model, batches: Iterable[Batch], device: str = "cpu") -> Iterator[Score]:
    """One Score for each window or row, in order. labels are compared with the logits of their
    own position."""
    for batch in batches:
        logits = model(batch.tokens.to(device), batch.cu_seqlens)
        yield from score_batch(logits, batch.labels.to(device))


def score_batch(logits: Tensor, labels: Tensor) -> list[Score]:
    """One Score for each row of logits [B, T, vocab_size] and labels [B, T] int64."""
    nll, hit = losses(logits, labels)
    scored = labels != IGNORED_LABEL
    columns = zip(nll.sum(1).tolist(), scored.sum(1).tolist(), hit.sum(1).tolist(), strict=True)
    return [Score(*column) for column in columns]


def losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """nll [B, T] float64, 0 where the label is -100; hit [B, T] bool, label is the argmax."""
    nll = torch.empty(labels.shape, dtype=torch.float64, device=labels.device)
    hit = torch.empty(labels.shape, dtype=torch.bool, device=labels.device)
    for start in range(0, labels.shape[1], SLICE):
        part = slice(start, start + SLICE)
        chosen = labels[:, part]
        piece = logits[:, part].float()
        # Vocabulary last: along any other axis torch sums the softmax naively, and 33,278 terms in
        # fp32 were measured to shift the loss by 5e-5 nats.
        losses = F.cross_entropy(
            piece.flatten(0, 1), chosen.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        )
        nll[:, part] = losses.view(chosen.shape).double()
        hit[:, part] = piece.argmax(-1) == chosen
    return nll, hit


def total(scores: Iterable[Score]) -> Score:
    """The sum of scores."""
    return sum(scores, Score(0.0, 0, 0))


def exponential(nats: float) -> float:
    """exp(nats), a perplexity; ValueError where the model's loss is no number or too large to
    have one."""
    if not nats < 700.0:
        raise ValueError(
            f"the model's loss has no perplexity: got {nats} nats; expected a finite number below "
            "700; the model has diverged or its weights are damaged"
        )
    return math.exp(nats)


def mean_and_error(scores: Sequence[Score]) -> tuple[float, float | None]:
    """Nats a token over all of them, and its standard error, each Score (document, row) a cluster.

    Tokens of one document are not independent, so the error comes from the documents: the delta
    method for the ratio sum(nll) / sum(tokens). None with fewer than two.
    """
    nll = np.array([s.nll for s in scores], dtype=np.float64)
    tokens = np.array([s.tokens for s in scores], dtype=np.float64)
    mean = float(nll.sum() / tokens.sum())
    n = len(scores)
    if n < 2:
        return mean, None
    spread = float(np.sum((nll - mean * tokens) ** 2)) * n / (n - 1)
    return mean, float(np.sqrt(spread) / tokens.sum())
