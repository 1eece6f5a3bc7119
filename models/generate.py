"""Continuing prompts: the prompt is read in bounded pieces, then one token at a time."""

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from models.language_model import LanguageModel, ModelState

PREFILL_TOKENS = 2048
"""Tokens of each row read by one prefill call: bounds memory, a multiple of every chunk length."""


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Collection[int] = (),
    seed: int = 0,
) -> list[list[int]]:
    """Continues every prompt.

    Prompts of equal length are read as one batch; none is ever padded, so a row's result does not
    depend on the others.

    Args:
        prompts: token ids, at least one each.
        max_new_tokens: >= 0.
        temperature: >= 0; 0 takes the most likely token.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the fewest most likely tokens that hold this much
            probability, in (0, 1].
        stop_ids: a row ends before one of these.
        seed: with the prompt's place in the list, decides its random numbers.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: a setting out of range, an empty prompt, an id outside the vocabulary, or more
            tokens than the model's max_seq_len.
    """
    _check_settings(max_new_tokens, temperature, top_k, top_p)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        _check_prompt(model, row, prompt, max_new_tokens)
        groups[len(prompt)].append(row)
    new_tokens: list[list[int]] = [[] for _ in prompts]
    if max_new_tokens == 0:
        return new_tokens
    device = model.embedding.weight.device
    for rows in groups.values():
        randoms = [torch.Generator().manual_seed(seed * 1_000_003 + row) for row in rows]
        tokens = torch.tensor([list(prompts[row]) for row in rows], device=device)
        logits, state = _read_prompt(model, tokens)
        open_rows = set(rows)
        while True:
            chosen = [
                _choose(logits[i], temperature, top_k, top_p, randoms[i]) for i in range(len(rows))
            ]
            for row, token in zip(rows, chosen, strict=True):
                if row in open_rows and token in stop_ids:
                    open_rows.remove(row)
                if row in open_rows:
                    new_tokens[row].append(token)
                    if len(new_tokens[row]) == max_new_tokens:
                        open_rows.remove(row)
            if not open_rows:
                break
            logits, state = model.step(torch.tensor(chosen, device=device), state)
    return new_tokens


def _read_prompt(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, ModelState]:
    """tokens [B, T], T >= 1 -> (logits of the last token [B, vocab_size], state)."""
    state = model.empty_state(tokens.shape[0])
    logits = tokens.new_empty(0)
    for piece in tokens.split(PREFILL_TOKENS, dim=1):
        logits, state = model.prefill(piece, state, last_only=True)
    return logits[:, -1], state


def _choose(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    random: torch.Generator,
) -> int:
    """One token from logits [vocab_size]."""
    if temperature == 0:
        return int(logits.argmax())
    probability, token = (logits.double().cpu() / temperature).softmax(-1).sort(descending=True)
    if top_k is not None:
        probability = probability[:top_k]
    if top_p is not None:
        before = probability.cumsum(-1) - probability
        probability = probability[before < top_p]  # never empty: nothing comes before the first
    return int(token[torch.multinomial(probability, 1, generator=random)])


def _check_settings(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be >= 0: got {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be >= 0 and finite: got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be >= 1: got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1]: got {top_p}")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError(
            "top_k and top_p need a temperature > 0: got temperature 0, which samples nothing"
        )


def _check_prompt(
    model: LanguageModel, row: int, prompt: Sequence[int], max_new_tokens: int
) -> None:
    config = model.config
    if not prompt:
        raise ValueError(f"prompt {row} is empty; expected at least one token, such as bos")
    if outside := [token for token in prompt if not 0 <= token < config.vocab_size]:
        raise ValueError(
            f"prompt {row} has token {outside[0]}; expected 0 to {config.vocab_size - 1} "
            f"(vocab_size={config.vocab_size})"
        )
    # The last new token is never read.
    if (total := len(prompt) + max(max_new_tokens - 1, 0)) > config.max_seq_len:
        raise ValueError(
            f"prompt {row} with its continuation is too long: got {len(prompt)} + "
            f"{max_new_tokens} tokens, {total} to read; expected at most "
            f"max_seq_len={config.max_seq_len}"
        )
