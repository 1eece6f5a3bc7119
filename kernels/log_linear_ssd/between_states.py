"""The Triton kernels between two states: tokens by the kernels, states by state_terms.py."""

import torch
from torch import Tensor

from kernels.log_linear_ssd.state_terms import final_state, past_output
from kernels.state import FenwickState
from kernels.tree_plan import CHUNK


def log_linear_ssd_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    lengths: tuple[int, ...],
    initial_state: FenwickState | None,
    return_final_state: bool,
) -> tuple[Tensor, FenwickState | None]:
    """o [B, T, H, V] and the final state if asked for, of documents laid end to end.

    The kernels know chunks aligned to a document's position 0. A document that begins inside a
    chunk gets empty slots before it, up to the chunk's start.
    """
    from kernels.log_linear_ssd.triton_op import log_linear_ssd_triton

    B, T = v.shape[:2]
    positions = [0] * len(lengths) if initial_state is None else initial_state.position.tolist()
    before = [p % CHUNK for p in positions]
    padded = [empty + length for empty, length in zip(before, lengths, strict=True)]
    cu_seqlens = torch.tensor([0, *padded]).cumsum(0)
    first = torch.tensor(positions) - torch.tensor(before)
    tokens = _tokens_of_slots(before, lengths, v.device) if any(before) else None

    def row(x: Tensor) -> Tensor:
        x = x.reshape(1, B * T, *x.shape[2:])
        return x if tokens is None else _with_empty_slots(x, tokens)

    o = log_linear_ssd_triton(
        row(q), row(k), row(v), row(log_decay), row(level_weights), cu_seqlens, first
    )
    o = (o if tokens is None else o[:, tokens < B * T]).reshape(v.shape)
    if initial_state is not None and any(positions):
        past = past_output(q, log_decay, level_weights, initial_state, lengths)
        o = (o.float() + past.reshape(v.shape)).to(v.dtype)
    state = None
    if return_final_state:
        state = final_state(k, v, log_decay, level_weights.shape[3], initial_state, lengths)
    return o, state


def _tokens_of_slots(before: list[int], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """For every slot its token, or the number of tokens where the slot is empty."""
    tokens, begin = [], 0
    for empty, length in zip(before, lengths, strict=True):
        tokens.append(torch.full((empty,), sum(lengths)))
        tokens.append(torch.arange(begin, begin + length))
        begin += length
    return torch.cat(tokens).to(device)


def _with_empty_slots(x: Tensor, tokens: Tensor) -> Tensor:
    nothing = x.new_zeros(1, 1, *x.shape[2:])
    return torch.cat([x, nothing], dim=1).index_select(1, tokens)
