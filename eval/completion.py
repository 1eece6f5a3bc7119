"""Greedy completion of prompts through models.generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from models.generate import generate
from models.language_model import LanguageModel


def complete(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    batch_tokens: int,
) -> Iterator[list[int]]:
    """The new ids of each prompt, in order, without the prompt; at most `max_new_tokens`, ended
    by a stop id."""
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
            model, list(prompts[start:end]), max_new_tokens=max_new_tokens, stop_ids=stop_ids
        )
        start = end
