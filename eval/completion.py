"""What comes after a prompt: greedy completions, and log-probabilities of given continuations.

Prompts of unequal length share batches, never padding: models.generate reads each length apart and
joins the states. A model without decoding states (the selftest's) is asked for logits of the whole
text every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from data_prep.shards import IGNORED_LABEL
from eval.scoring import Model, Score, Window, score, score_batch, window_batches
from models.decoding_state import pick_rows
from models.generate import generate, read_prompt
from models.language_model import LanguageModel, ModelState

COPIES = 4  # of a prompt's state at a time: one can take hundreds of megabytes
PADDING = 0  # an id that stands where nothing is scored, on the right


def complete(
    model: Model,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    batch_tokens: int,
    finished: Callable[[list[int]], bool] = lambda new: False,
) -> Iterator[list[int]]:
    """The new ids of each prompt, in order, without the prompt; at most `max_new_tokens`, ended
    before a stop id, or after the one that makes the new ids `finished`."""
    if not isinstance(model, LanguageModel):
        for prompt in prompts:
            yield _complete_by_logits(model, prompt, max_new_tokens, stop_ids, finished)
        return
    start = 0
    while start < len(prompts):
        end = start + 1
        longest = len(prompts[start])
        while end < len(prompts):
            longest = max(longest, len(prompts[end]))
            if (longest + max_new_tokens) * (end - start + 1) > batch_tokens:
                break
            end += 1
        yield from generate(
            model,
            prompts[start:end],
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            finished=lambda row, new: finished(new),
        )
        start = end


@torch.no_grad()
def _complete_by_logits(
    model: Model,
    prompt: list[int],
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    finished: Callable[[list[int]], bool],
) -> list[int]:
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and finished(new)):
        token = int(model(torch.tensor([prompt + new]))[0, -1].argmax())
        if token in stop_ids:
            break
        new.append(token)
    return new


@torch.no_grad()
def score_continuations(
    model: Model, prompt: list[int], continuations: Sequence[list[int]], device: str
) -> list[Score]:
    """One Score for each continuation straight after `prompt`, which is read once.

    Args:
        prompt, continuations: ids, at least one each.
    """
    if not isinstance(model, LanguageModel):
        windows = [Window([*prompt, *ids[:-1]], ids) for ids in continuations]
        return list(score(model, window_batches(windows, batch_tokens=1), device))
    tokens = torch.tensor([prompt], device=device)
    first, state = read_prompt(model, tokens, model.empty_state(1))
    scores = []
    for start in range(0, len(continuations), COPIES):
        scores += _continued(model, first, state, continuations[start : start + COPIES], device)
    return scores


def _continued(
    model: LanguageModel,
    first: Tensor,
    state: ModelState,
    continuations: Sequence[list[int]],
    device: str,
) -> list[Score]:
    """The scores after a prompt that left its last logits [1, vocab_size] and its state."""
    rows, longest = len(continuations), max(map(len, continuations))
    labels = torch.full((rows, longest), IGNORED_LABEL, dtype=torch.int64)
    inputs = torch.full((rows, longest - 1), PADDING, dtype=torch.int64)
    for row, ids in enumerate(continuations):
        labels[row, : len(ids)] = torch.tensor(ids)
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
    logits = first[:, None].expand(rows, 1, -1)
    if longest > 1:
        rest, _ = model.prefill(inputs.to(device), pick_rows(state, [0] * rows))
        logits = torch.cat([logits, rest], dim=1)
    return score_batch(logits, labels.to(device))
