"""Running a form that knows only whole rows over documents that are packed into one row."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.state import FenwickState

Recurrence = Callable[..., tuple[Tensor, FenwickState]]


def run_by_document(
    recurrence: Recurrence,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...],
    initial_state: FenwickState | None,
) -> tuple[Tensor, FenwickState]:
    """recurrence(*inputs, state) for each document by itself, outputs and states put together.

    inputs: q, k, v, ..., level_weights, each [B, T, ...]; lengths: the documents, B * T tokens.
    """
    q, v, level_weights = inputs[0], inputs[2], inputs[-1]
    (B, T, _, K), (H, V), L = q.shape, v.shape[2:], level_weights.shape[-1]
    if initial_state is None:
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        initial_state = FenwickState.empty(len(lengths), H, L, K, V, device=v.device, dtype=dtype)
    flat = [x.reshape(1, B * T, *x.shape[2:]) for x in inputs]
    outputs, levels, positions, start = [], [], [], 0
    for n, length in enumerate(lengths):
        state = FenwickState(initial_state.levels[n : n + 1], initial_state.position[n : n + 1])
        o, state = recurrence(*(x[:, start : start + length] for x in flat), state)
        outputs.append(o)
        levels.append(state.levels)
        positions.append(state.position)
        start += length
    o = torch.cat(outputs, dim=1).reshape(B, T, H, V)
    return o, FenwickState(torch.cat(levels), torch.cat(positions))
