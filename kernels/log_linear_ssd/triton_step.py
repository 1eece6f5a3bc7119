"""One token of log-linear SSD in one kernel, on a state that is changed where it lies.

Only levels that the token can read are touched: the carry reads what it merges and writes one
level, the others are read once and keep their bytes, since decay is written beside them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.state import LazyFenwickState
from kernels.triton_levels import bit_length

TILE = 8192
"""Elements of a state that a program holds at a time."""


@triton.jit(do_not_specialize=["H", "G", "L"])
def step_kernel(
    q_, k_, v_, log_decay, level_weights, levels, log_scale, position, o_, H, G, L,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0)
    b = bh // H
    group = b * G + bh % H // (H // G)
    t = tl.load(position + b).to(tl.int32)
    target = tl.where(t == 0, 0, bit_length(t & -t))  # the level that the carry fills, if any
    columns = tl.arange(0, VP)
    inside = columns < V
    state = levels + bh.to(tl.int64) * L * (K * V)
    scales = log_scale + bh * L
    weights = level_weights + bh * L
    g = tl.load(log_decay + bh).to(tl.float32)
    v = tl.load(v_ + bh * V + columns, mask=inside, other=0.0).to(tl.float32)
    o = tl.zeros((VP,), tl.float32)
    far = t >> target << target  # bits of the levels above the carry's
    count = 0
    for j in tl.static_range(31):
        count += (far >> j) & 1
    for block in tl.static_range(K // BK):
        rows = block * BK + tl.arange(0, BK)
        q = tl.load(q_ + group * K + rows).to(tl.float32)[:, None]
        k = tl.load(k_ + group * K + rows).to(tl.float32)[:, None]
        at = rows[:, None] * V + columns[None, :]
        mask = (rows < K)[:, None] & inside[None, :]
        merged = tl.zeros((BK, VP), tl.float32)
        for l in range(target):
            scale = tl.exp(tl.load(scales + l))
            merged += tl.load(state + l * (K * V) + at, mask=mask, other=0.0) * scale
        if target > 0:
            tl.store(state + target * (K * V) + at, merged, mask=mask)
            weight = tl.load(weights + target).to(tl.float32) * tl.exp(g)
            o += tl.sum(q * merged, 0) * weight
        rest = far
        for _ in tl.range(0, count, num_stages=STAGES):
            low = rest & (-rest)
            l = bit_length(low)
            weight = tl.load(weights + l).to(tl.float32) * tl.exp(tl.load(scales + l) + g)
            o += tl.sum(q * tl.load(state + l * (K * V) + at, mask=mask, other=0.0), 0) * weight
            rest = rest - low
        new = k * v[None, :]
        o += tl.sum(q * new, 0) * tl.load(weights).to(tl.float32)
        tl.debug_barrier()  # level 0 has been merged by every thread
        tl.store(state + at, new, mask=mask)
    tl.store(o_ + bh * V + columns, o.to(o_.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # the scales have been read by every thread
    l = tl.arange(0, 32)
    held = l < L
    scale = tl.load(scales + l, mask=held, other=0.0)
    live = ((far >> tl.maximum(l - 1, 0)) & 1) == 1
    scale = tl.where((l > target) & live, scale + g, tl.where((l == target) & (l > 0), g, 0.0))
    tl.debug_barrier()
    tl.store(scales + l, scale, mask=held)


def log_linear_ssd_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    state: LazyFenwickState,
) -> Tensor:
    """o [B, H, V] in v's dtype; `state` then holds the token. See op.py for the arguments."""
    B, G, K = q.shape
    H, V = v.shape[1:]
    VP = triton.next_power_of_2(V)
    BK = min(K & -K, max(1, TILE // VP))
    o = torch.empty_like(v)
    step_kernel[(B * H,)](
        q.contiguous(), k.contiguous(), v.contiguous(), log_decay.contiguous(),
        level_weights.contiguous(), state.levels, state.log_scale, state.position, o,
        H, G, level_weights.shape[2],
        K=K, BK=BK, V=V, VP=VP, STAGES=2, num_warps=4,
    )  # fmt: skip
    state.position.add_(1)
    return o
