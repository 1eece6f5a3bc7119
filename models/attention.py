"""Softmax attention with rotary positions: the baseline whose memory grows with T.

Positions start at 0 in every document, and a packed document is attended to by a call of its own,
so documents cannot see each other whatever the backend of scaled_dot_product_attention.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers import Linear, at_least_fp32


@dataclass(frozen=True)
class AttentionState:
    """k (rotated) and v of every token read so far, [B, H, P, D / H]."""

    k: Tensor
    v: Tensor


class Attention(nn.Module):
    """One mixer, [B, T, D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.d_model
        self.H, self.theta = config.attention.num_heads, config.attention.rope_theta
        self.head_size = D // self.H
        self.q_proj = Linear(D, D)
        self.k_proj = Linear(D, D)
        self.v_proj = Linear(D, D)
        self.o_proj = Linear(D, D)

    def empty_state(self, batch_size: int) -> AttentionState:
        """The state before the first token."""
        nothing = self.q_proj.weight.new_zeros(batch_size, self.H, 0, self.head_size)
        return AttentionState(nothing, nothing)

    def forward(self, u: Tensor, cu_seqlens: Tensor | None, longest: int) -> Tensor:
        """Whole documents.

        Args:
            u: [B, T, D]; with cu_seqlens [N+1], B = 1 and the row holds N documents.
            longest: tokens of the longest document.
        """
        rotations = self._rotations(0, longest, u.device)
        if cu_seqlens is None:
            q, k, v = self._heads(u, rotations)
            return self._output(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        lengths = cu_seqlens.diff().tolist()
        rotations = torch.cat([rotations[:, :length] for length in lengths], dim=1)
        q, k, v = self._heads(u, rotations)
        by_document = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        documents = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in by_document
        ]
        return self._output(torch.cat(documents, dim=2))

    def prefill(self, u: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """T >= 1 tokens [B, T, D] that follow `state`."""
        past, T = state.k.shape[2], u.shape[1]
        q, k, v = self._heads(u, self._rotations(past, past + T, u.device))
        k = torch.cat([state.k.to(k.dtype), k], dim=2)
        v = torch.cat([state.v.to(v.dtype), v], dim=2)
        visible = torch.ones(T, past + T, dtype=torch.bool, device=u.device).tril(past)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self._output(o), AttentionState(k, v)

    def step(self, u: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """One token [B, D] that follows `state`; O(T) work."""
        y, state = self.prefill(u[:, None], state)
        return y[:, 0], state

    def _rotations(self, start: int, end: int, device: torch.device) -> Tensor:
        """[2, T, head_size / 2] cosines and sines of the positions start..end-1.

        Frequency i is theta^(-2i / head_size); computed in fp64, for fp32 angles are off by 1e-3 at
        2^14 tokens.
        """
        half = torch.arange(0, self.head_size, 2, dtype=torch.float64, device=device)
        frequency = self.theta ** (-half / self.head_size)
        position = torch.arange(start, end, dtype=torch.float64, device=device)
        angle = position[:, None] * frequency
        return torch.stack([angle.cos(), angle.sin()])

    def _heads(self, u: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (rotated) and v, [B, H, T, head_size]."""
        q, k, v = (
            projection(u).unflatten(-1, (self.H, self.head_size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return _rotate(q, rotations), _rotate(k, rotations), v

    def _output(self, o: Tensor) -> Tensor:
        return self.o_proj(o.transpose(1, 2).flatten(-2))


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_size / 2]) by its angle; x [B, H, T, head_size]."""
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    cos, sin = rotations.to(first.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
