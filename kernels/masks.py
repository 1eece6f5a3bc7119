"""The two masks of the dense forms: O(T^2), for the specification and its tests only."""

import torch
from torch import Tensor

from kernels.levels import level_matrix


def decay_mask(log_decay: Tensor) -> Tensor:
    """[B, T, H] -> [B, H, T, T]: exp of the sum of g over s+1..t where s <= t, else 0."""
    total = log_decay.transpose(1, 2).cumsum(-1)
    segment = total[..., :, None] - total[..., None, :]
    future = torch.ones_like(segment, dtype=torch.bool).triu(1)
    return segment.masked_fill(future, -torch.inf).exp()


def level_mask(level_weights: Tensor, T: int) -> Tensor:
    """[B, T, H, L] -> [B, H, T, T]: lambda_t[level(t, s)] where s <= t, else 0."""
    levels = level_matrix(T, level_weights.device).expand(*level_weights.shape[::2], T, T)
    weights = level_weights.transpose(1, 2)  # [B, H, T, L]
    index = levels.clamp(max=weights.shape[-1] - 1)  # only pairs s > t, masked next, can be clamped
    return weights.gather(-1, index).tril()
