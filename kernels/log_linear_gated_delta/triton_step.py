"""One token of the gated delta rule in one kernel, on a state that is changed where it lies.

Only levels that the token can read are touched. The rule changes every one of them by a vector
product, so each is read once and written once; its decay goes into what is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.log_linear_ssd.triton_tiles import bit_length
from kernels.state import LazyFenwickState

STEP_TILE = 8192
"""Elements of a state that a program holds at a time."""


@triton.jit(do_not_specialize=["H", "G", "L"])
def gated_delta_step_kernel(
    q_, k_, v_, log_decay, beta_, level_weights, levels, log_scale, position, o_, H, G, L,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV columns of the states of one head: S <- exp(g) (I - beta k k^T) S for all live levels."""
    bh = tl.program_id(0)
    b = bh // H
    group = b * G + bh % H // (H // G)
    t = tl.load(position + b).to(tl.int32)
    target = tl.where(t == 0, 0, bit_length(t & -t))  # the level that the carry fills, if any
    rows = tl.arange(0, KP)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = columns < V
    at = rows[:, None] * V + columns[None, :]
    mask = (rows < K)[:, None] & inside[None, :]
    state = levels + bh.to(tl.int64) * L * (K * V)
    scales = log_scale + bh * L
    weights = level_weights + bh * L
    g = tl.load(log_decay + bh).to(tl.float32)
    beta = tl.load(beta_ + bh).to(tl.float32)
    q = tl.load(q_ + group * K + rows, mask=rows < K, other=0.0).to(tl.float32)[:, None]
    k = tl.load(k_ + group * K + rows, mask=rows < K, other=0.0).to(tl.float32)[:, None]
    v = tl.load(v_ + bh * V + columns, mask=inside, other=0.0).to(tl.float32)
    o = tl.zeros((BV,), tl.float32)
    far = t >> target << target  # bits of the levels above the carry's
    count = (target > 0).to(tl.int32)
    for j in tl.static_range(31):
        count += (far >> j) & 1
    rest = far
    for x in range(count):
        merging = (x == 0) & (target > 0)
        low = rest & (-rest)
        l = tl.where(merging, target, bit_length(low))
        s = tl.zeros((KP, BV), tl.float32)
        first = tl.where(merging, 0, l)
        stop = tl.where(merging, target, l + 1)
        for y in range(first, stop):
            scale = tl.exp(tl.load(scales + y))
            s += tl.load(state + y * (K * V) + at, mask=mask, other=0.0) * scale
        held = tl.sum(k * s, 0)
        s = (s - k * (beta * held)[None, :]) * tl.exp(g)
        o += tl.sum(q * s, 0) * tl.load(weights + l).to(tl.float32)
        tl.store(state + l * (K * V) + at, s, mask=mask)
        rest = tl.where(merging, rest, rest - low)
    new = k * (beta * v)[None, :]
    o += tl.sum(q * new, 0) * tl.load(weights).to(tl.float32)
    tl.debug_barrier()  # level 0 has been merged by every thread
    tl.store(state + at, new, mask=mask)
    tl.store(o_ + bh * V + columns, o.to(o_.dtype.element_ty), mask=inside)


def gated_delta_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    state: LazyFenwickState,
) -> Tensor:
    """o [B, H, V] in v's dtype; `state` then holds the token, its decay carried out (log_scale 0).
    See op.py for the arguments."""
    B, G, K = q.shape
    H, V = v.shape[1:]
    KP = triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), max(16, STEP_TILE // KP))
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    gated_delta_step_kernel[(B * H, triton.cdiv(V, BV))](
        q.contiguous(), k.contiguous(), v.contiguous(), log_decay.contiguous(), beta.contiguous(),
        level_weights.contiguous(), state.levels, state.log_scale, state.position, o,
        H, G, level_weights.shape[2],
        K=K, KP=KP, V=V, BV=BV, num_warps=4,
    )  # fmt: skip
    state.log_scale.zero_()
    state.position.add_(1)
    return o
