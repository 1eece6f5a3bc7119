"""The [C, C] weights inside a chunk, shared by the chunked forms of both operators."""

import torch
from torch import Tensor


def level_tile(level_weights: Tensor) -> Tensor:
    """[..., C, m+1] with C = 2**m -> [..., C, C]: lambda_t[level(t, s)] for s <= t, 0 for s > t.

    Built by doubling: a tile of twice the length has two smaller tiles on its diagonal and, below
    them, the one level at which its right half sees its left half. No gather, so the gradient is
    sums only (deterministic on every device).
    """
    C, levels = level_weights.shape[-2:]
    lead = level_weights.shape[:-2]
    tile = level_weights[..., 0].reshape(*lead, C, 1, 1)
    for l in range(1, levels):
        half = 1 << (l - 1)
        pairs = tile.reshape(*lead, C // (2 * half), 2, half, half)
        across = level_weights[..., l].reshape(*lead, C // (2 * half), 2, half)[..., 1, :, None]
        zero = torch.zeros_like(pairs[..., 0, :, :])
        upper = torch.cat([pairs[..., 0, :, :], zero], dim=-1)
        lower = torch.cat([across.expand_as(zero), pairs[..., 1, :, :]], dim=-1)
        tile = torch.cat([upper, lower], dim=-2)
    return tile.reshape(*lead, C, C)


def decay_tile(total: Tensor) -> Tensor:
    """[..., C] running sums of g in fp64 -> [..., C, C] fp64: exp(g_{s+1} + ... + g_t), s <= t.

    In fp64, since the difference of two running sums of strong decay would lose its digits in
    fp32. The diagonal is the constant 1: left to autograd, its two gradients of opposite sign would
    bury the tiny one that strong decay leaves.
    """
    C = total.shape[-1]
    segment = total[..., :, None] - total[..., None, :]
    ones = torch.ones(C, C, dtype=torch.bool, device=total.device)
    segment = segment.masked_fill(ones.triu(), -torch.inf)  # so that exp cannot overflow
    return segment.exp() + torch.eye(C, dtype=total.dtype, device=total.device)


def sum_to_end(g: Tensor, dim: int) -> Tensor:
    """Sum of g over the slots after each slot: summed from the end, for the same reason."""
    C = g.shape[dim]
    later = torch.cat([g.narrow(dim, 1, C - 1), torch.zeros_like(g.narrow(dim, 0, 1))], dim)
    return later.flip(dim).cumsum(dim).flip(dim)
