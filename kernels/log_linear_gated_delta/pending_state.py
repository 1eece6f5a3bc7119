"""A state for decoding with the gated delta rule, changed where it lies, whose changes wait."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.state import FenwickState

PENDING = 16
"""Tokens after which the changes that wait are carried out; a power of two."""


@dataclass(frozen=True)
class PendingFenwickState:
    """The rule changes every live level by k_i w_i^T at every token i. Instead of writing all of a
    state, a step writes w, and its decay, beside it:

        S[l] = exp(log_scale[l]) * (levels[l] - sum_i keys[i] values[l, i]^T)

    over the tokens i after the level was last written: when the carry made it, or at the last
    multiple of PENDING. So a step reads the live levels once and, but for every sixteenth, writes
    two of them. Levels that are not live hold leftovers. All tensors are on one device and never
    move, as a CUDA graph needs.

    levels: [N, H, L, K, V] fp32;  log_scale: [N, H, L] fp32;  position: [N] int64;
    keys: [N, H, PENDING, K], values: [N, H, L, PENDING, V] fp32, token i at i modulo PENDING.
    """

    levels: Tensor
    log_scale: Tensor
    position: Tensor
    keys: Tensor
    values: Tensor

    @staticmethod
    def of(state: FenwickState) -> "PendingFenwickState":
        """A copy of `state`, with nothing waiting."""
        levels = state.levels.float().clone(memory_format=torch.contiguous_format)
        N, H, L, K, V = levels.shape
        return PendingFenwickState(
            levels,
            levels.new_zeros(N, H, L),
            state.position.to(levels.device, copy=True),
            levels.new_zeros(N, H, PENDING, K),
            levels.new_zeros(N, H, L, PENDING, V),
        )

    def settled(self) -> FenwickState:
        """A copy with all changes carried out and the levels that are not live zero."""
        device = self.levels.device
        l = torch.arange(self.levels.shape[2], device=device)
        last = self.position[:, None] - 1  # the token that the levels are seen from
        bit = (l - 1).clamp(min=0)
        live = torch.where(l == 0, last >= 0, (last.clamp(min=0) >> bit) & 1 == 1)
        window = last.clamp(min=0) // PENDING * PENDING
        written = torch.maximum(last.clamp(min=0) >> bit << bit, window)
        i = torch.arange(PENDING, device=device) + window[..., None]  # [N, 1, PENDING]: tokens
        waiting = (i > written[..., None]) & (i <= last[..., None]) & (l > 0)[:, None]
        values = torch.where(waiting[:, None, ..., None], self.values, 0)
        levels = self.levels - torch.einsum("nhik,nhliv->nhlkv", self.keys, values)
        levels = levels * self.log_scale.exp()[..., None, None]
        levels = torch.where(live[:, None, :, None, None], levels, 0)
        return FenwickState(levels, self.position.clone())
