"""Continuing prompts: each is read in bounded pieces, then all step together, token by token.

Prompts of equal length are read as one batch, others apart, so that none is ever padded; the states
they leave are joined, whatever their positions, and one step then serves all rows. A row that is
finished leaves the batch.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from models.config import check_document_length
from models.decode_graph import GraphedStep
from models.decoding_state import join_states, pick_rows
from models.language_model import LanguageModel, ModelState
from models.sampling import Sampling, row_random

PREFILL_TOKENS = 2048
"""Tokens that one prefill call reads, over all its rows: bounds memory; a multiple of every chunk
length."""

Finished = Callable[[int, list[int]], bool]
"""Asked after every new token with the prompt's place and its new tokens so far."""


@torch.no_grad()
def generate_stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Collection[int] = (),
    finished: Finished | None = None,
    seed: int = 0,
    cuda_graph: bool = False,
) -> Iterator[tuple[int, int]]:
    """Continues every prompt and yields each new token as soon as it is chosen.

    A row's result depends on its neighbours by the rounding of batched products only.

    Args:
        prompts: token ids, at least one each.
        max_new_tokens: >= 0.
        temperature, top_k, top_p: see models/sampling.py.
        stop_ids: a row ends before one of these.
        finished: ends a row after the token it was asked about.
        seed: with the prompt's place in the list, decides its random numbers.
        cuda_graph: replay each step as one CUDA graph; finished rows then stay in the batch.

    Yields:
        (place in `prompts`, token)

    Raises:
        ValueError: at the first token: a setting out of range, an empty prompt, an id outside the
            vocabulary, more tokens than the model's max_seq_len, or a graph without a CUDA device.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be >= 0: got {max_new_tokens}")
    for row, prompt in enumerate(prompts):
        _check_prompt(model, row, prompt, max_new_tokens)
    if max_new_tokens == 0 or not prompts:
        return
    device = model.embedding.weight.device
    rows, logits, state = _read_prompts(model, prompts)
    graph = GraphedStep(model, state, max_new_tokens) if cuda_graph else None
    randoms = [row_random(seed, row) for row in rows]
    new_tokens: dict[int, list[int]] = {row: [] for row in rows}
    while True:
        chosen = sampling.choose(logits, randoms)
        kept = []
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            tokens = new_tokens.get(row)
            if tokens is None:
                continue
            ended = token in stop_ids
            if not ended:
                tokens.append(token)
                yield row, token
                ended = len(tokens) == max_new_tokens
                ended = ended or (finished is not None and finished(row, tokens))
            if ended:
                del new_tokens[row]
            else:
                kept.append(place)
        if not kept:
            return
        if graph is not None:
            logits = graph(torch.tensor(chosen, device=device))
            continue
        if len(kept) < len(rows):
            rows, chosen = [rows[i] for i in kept], [chosen[i] for i in kept]
            randoms = [randoms[i] for i in kept]
            state = pick_rows(state, kept)
        logits, state = model.step(torch.tensor(chosen, device=device), state)


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Collection[int] = (),
    finished: Finished | None = None,
    seed: int = 0,
    cuda_graph: bool = False,
) -> list[list[int]]:
    """The new tokens of each prompt; arguments and errors as for `generate_stream`."""
    new_tokens: list[list[int]] = [[] for _ in prompts]
    for row, token in generate_stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=stop_ids,
        finished=finished,
        seed=seed,
        cuda_graph=cuda_graph,
    ):
        new_tokens[row].append(token)
    return new_tokens


def read_prompt(
    model: LanguageModel, tokens: Tensor, state: ModelState
) -> tuple[Tensor, ModelState]:
    """Reads tokens [B, T], T >= 1, in pieces of about PREFILL_TOKENS over all rows, which bounds
    memory whatever T is -> (logits of the last token [B, vocab_size], state)."""
    # A power of two: chunks of the next piece then start where chunks end.
    piece_tokens = 1 << max(1, PREFILL_TOKENS // len(tokens)).bit_length() - 1
    logits = tokens.new_empty(0)
    for piece in tokens.split(piece_tokens, dim=1):
        logits, state = model.prefill(piece, state, last_only=True)
    return logits[:, -1], state


def _read_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]]
) -> tuple[list[int], Tensor, ModelState]:
    """(places in `prompts` in the order of the batch, last logits [B, vocab_size], joined state)"""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        groups[len(prompt)].append(row)
    device = model.embedding.weight.device
    parts = []
    for rows in groups.values():
        tokens = torch.tensor([list(prompts[row]) for row in rows], device=device)
        parts.append(read_prompt(model, tokens, model.empty_state(len(rows))))
    order = [row for rows in groups.values() for row in rows]
    logits = torch.cat([part[0] for part in parts])
    return order, logits, join_states([part[1] for part in parts])


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
    total = len(prompt) + max(max_new_tokens - 1, 0)
    what = f"prompt {row} with its continuation ({len(prompt)} + {max_new_tokens} tokens)"
    check_document_length(config, total, what)
