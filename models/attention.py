"""Softmax attention with rotary positions: the baseline whose memory grows with T.

    q, k = rotate(norm(q_proj(u))), rotate(norm(k_proj(u)))      norm: RMSNorm per head, if qk_norm
    o_t = sum_s softmax_s(q_t . k_s / sqrt(head size)) v_s       s <= t, and s > t - window if given

- num_kv_heads key/value heads are shared by num_heads query heads.
- Positions start at 0 in every document, and a packed document is attended to by a call of its own,
  so documents cannot see each other whatever the backend of scaled_dot_product_attention.
- Between calls the keys and values lie in a ring: position p in slot p mod P. Without a window P
  grows before it is reached; with one P ends at `window`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.fused.rotary import rotate, rotation_table
from models.config import ModelConfig
from models.layers import Linear, RMSNorm, at_least_fp32

CACHE_GROWTH = 64
"""Slots that a full cache grows by at least (else a quarter), so that few steps copy it."""


@dataclass(frozen=True)
class AttentionState:
    """Keys and values of the tokens that the next one can see.

    k (rotated), v: [B, G, P, head_size], position p of a row in slot p mod P; slots that no visible
        position has are never read. A step writes into them.
    position: [B] int64, tokens read so far; on the CPU, or beside k where the caller has made P
        large enough and checks lengths (see FenwickState).
    """

    k: Tensor
    v: Tensor
    position: Tensor

    @property
    def capacity(self) -> int:
        """P."""
        return self.k.shape[2]

    def slot_positions(self) -> Tensor:
        """[B, P] the position that each slot holds, negative where none; on k's device."""
        last = self.position.to(self.k.device)[:, None] - 1
        slot = torch.arange(self.capacity, device=self.k.device)
        return last - (last - slot) % max(self.capacity, 1)

    def grown(self, capacity: int) -> "AttentionState":
        """The same with `capacity` >= P slots; no position has come round the ring yet."""
        room = (0, 0, 0, capacity - self.capacity)
        return AttentionState(F.pad(self.k, room), F.pad(self.v, room), self.position)


class Attention(nn.Module):
    """One mixer, [B, T, D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, sizes = config.d_model, config.attention
        self.H, self.theta, self.window = sizes.num_heads, sizes.rope_theta, sizes.window
        self.G = sizes.kv_heads
        self.head_size = D // self.H
        self.q_proj = Linear(D, D)
        self.k_proj = Linear(D, self.G * self.head_size)
        self.v_proj = Linear(D, self.G * self.head_size)
        self.o_proj = Linear(D, D)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if sizes.qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.norm_eps)
            self.k_norm = RMSNorm(self.head_size, config.norm_eps)

    def empty_state(self, batch_size: int) -> AttentionState:
        """The state before the first token."""
        nothing = self.q_proj.weight.new_zeros(batch_size, self.G, 0, self.head_size)
        return AttentionState(nothing, nothing, torch.zeros(batch_size, dtype=torch.int64))

    def forward(self, u: Tensor, cu_seqlens: Tensor | None, longest: int) -> Tensor:
        """Whole documents.

        Args:
            u: [B, T, D]; with cu_seqlens [N+1], B = 1 and the row holds N documents.
            longest: tokens of the longest document.
        """
        table = rotation_table(self.head_size, self.theta, longest, u.device)
        q, k, v = self._projected(u)
        q, k = rotate(q, table, cu_seqlens), rotate(k, table, cu_seqlens)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cu_seqlens is None:
            return self._output(self._document(q, k, v))
        lengths = cu_seqlens.diff().tolist()
        by_document = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        documents = [self._document(q, k, v) for q, k, v in by_document]
        return self._output(torch.cat(documents, dim=2))

    def prefill(self, u: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """T >= 1 tokens [B, T, D] that follow `state`."""
        T = u.shape[1]
        position = state.position.to(u.device)[:, None] + torch.arange(T, device=u.device)
        q, k, v = self._heads(u, position)
        if int(state.position.max()) == 0:
            o = self._document(q, k, v)
        else:
            past = state.slot_positions()
            keys = torch.cat([state.k.to(k.dtype), k], dim=2)
            values = torch.cat([state.v.to(v.dtype), v], dim=2)
            o = self._attend(
                q, keys, values, self._visible(position, torch.cat([past, position], 1))
            )
        return self._output(o), self._write(state, k, v)

    def step(self, u: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """One token [B, D] that follows `state`; O(T) work, O(window) with a window. Writes into
        the memory of `state`."""
        if state.position.device.type == "cpu":
            state = self._with_room(state)
        position = state.position.to(u.device)[:, None]
        q, k, v = self._heads(u[:, None], position)
        rows = torch.arange(len(u), device=u.device)
        slot = position[:, 0] % state.capacity
        keys, values = state.k.to(k.dtype), state.v.to(v.dtype)
        keys[rows, :, slot] = k[:, :, 0]
        values[rows, :, slot] = v[:, :, 0]
        state = AttentionState(keys, values, state.position + 1)
        visible = self._visible(position, state.slot_positions())
        return self._output(self._attend(q, keys, values, visible))[:, 0], state

    def _with_room(self, state: AttentionState) -> AttentionState:
        """At least one free slot, or the whole window."""
        needed = int(state.position.max()) + 1
        if needed > state.capacity and state.capacity != self.window:
            capacity = state.capacity + max(CACHE_GROWTH, state.capacity // 4)
            return state.grown(min(capacity, self.window or capacity))
        return state

    def _write(self, state: AttentionState, k: Tensor, v: Tensor) -> AttentionState:
        """The state after T more tokens with k, v [B, G, T, head_size]; exactly as large as it
        must be where all rows are at one position."""
        B, T = k.shape[0], k.shape[2]
        longest = int(state.position.max()) + T
        capacity = max(state.capacity, min(longest, self.window or longest))
        state = state.grown(capacity)
        keys, values = state.k.to(k.dtype, copy=True), state.v.to(v.dtype, copy=True)
        kept = min(T, capacity)  # earlier ones would be overwritten
        slots = state.position[:, None] + torch.arange(T - kept, T)
        slots = (slots % capacity).to(k.device)
        rows = torch.arange(B, device=k.device)[:, None]
        keys[rows, :, slots] = k[:, :, T - kept :].transpose(1, 2)
        values[rows, :, slots] = v[:, :, T - kept :].transpose(1, 2)
        return AttentionState(keys, values, state.position + T)

    def _document(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One document from its start: q [B, H, T, head_size], k, v [B, G, T, head_size]."""
        k, v = (x.repeat_interleave(self.H // self.G, dim=1) for x in (k, v))
        T, W = q.shape[2], self.window
        if W is None or T <= W:
            with best_backend(q.device):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # Blocks of W queries see their own block and the one before: O(T W), not O(T^2), memory.
        blocks = -(-T // W)
        q, k, v = (F.pad(x, (0, 0, 0, blocks * W - T)).unflatten(2, (blocks, W)) for x in (q, k, v))
        first = F.scaled_dot_product_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], is_causal=True)
        keys, values = (torch.cat([x[:, :, :-1], x[:, :, 1:]], dim=3) for x in (k, v))
        position = torch.arange(2 * W, device=q.device)[None]
        visible = self._visible(position[:, W:], position)[0]
        q, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q[:, :, 1:], keys, values))
        rest = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
        rest = rest.unflatten(0, (-1, blocks - 1)).transpose(1, 2).flatten(2, 3)
        return torch.cat([first, rest], dim=2)[:, :, :T]

    def _visible(self, reader: Tensor, read: Tensor) -> Tensor:
        """[B, T, P]: whether the token at position reader[b, t] sees the one at read[b, p]; no
        token at a negative position is seen."""
        distance = reader[:, :, None] - read[:, None, :]
        visible = (distance >= 0) & (read >= 0)[:, None, :]
        return visible if self.window is None else visible & (distance < self.window)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """q [B, H, T, head_size], k, v [B, G, P, head_size], visible [B, T, P].

        The heads of a group are further queries of its key/value head, so nothing is repeated.
        """
        T, per_group = q.shape[2], self.H // self.G
        q = q.unflatten(1, (self.G, per_group)).flatten(2, 3)  # [B, G, (H/G) T, head_size]
        visible = visible.repeat(1, per_group, 1)[:, None]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return o.unflatten(2, (per_group, T)).flatten(1, 2)

    def _rotations(self, position: Tensor) -> Tensor:
        """[2, ..., head_size / 2] cosines and sines of `position` [...].

        Frequency i is theta^(-2i / head_size); computed in fp64, for fp32 angles are off by 1e-3 at
        2^14 tokens.
        """
        half = torch.arange(0, self.head_size, 2, dtype=torch.float64, device=position.device)
        frequency = self.theta ** (-half / self.head_size)
        angle = position[..., None].double() * frequency
        return torch.stack([angle.cos(), angle.sin()])

    def _heads(self, u: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, head_size], k and v [B, G, T, head_size], q and k rotated to `position`
        [T] or [B, T]."""
        rotations = self._rotations(position)
        if position.dim() == 2:
            rotations = rotations[:, :, None]  # the same for all heads
        q, k, v = (x.transpose(1, 2) for x in self._projected(u))
        return _rotate(q, rotations), _rotate(k, rotations), v

    def _projected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, head_size], k and v [B, T, G, head_size], q and k normalised if at all."""
        q, k, v = (
            projection(u).unflatten(-1, (-1, self.head_size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return q, k, v

    def _output(self, o: Tensor) -> Tensor:
        return self.o_proj(o.transpose(1, 2).flatten(-2))


BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In the order of their speed on Hopper for long causal rows; the first that can is taken."""


def best_backend(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, scaled_dot_product_attention prefers what is fastest on a GPU."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel(BACKENDS, set_priority=True)


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_size / 2]) by its angle; x [B, H, T, head_size]."""
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    cos, sin = rotations.to(first.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
