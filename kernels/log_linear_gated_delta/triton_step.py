"""One token of the gated delta rule in one pass over the live levels, on a state that is changed
where it lies (pending_state.py says how changes wait)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.log_linear_gated_delta.pending_state import PENDING, PendingFenwickState
from kernels.triton_levels import bit_length

STEP_TILE = 8192
"""Elements of a state that a program holds at a time."""
STEP_WARPS = 4
STEP_STAGES = 3
"""States that are on their way from memory while one is read."""


@triton.jit
def _changed(base, keys, values, first, stop, rows, columns, mask, K, V):
    """base less what waits: sum of key value^T over slots `first` to `stop` - 1."""
    for i in range(first, stop):
        key = tl.load(keys + i * K + rows, mask=rows < K, other=0.0)
        value = tl.load(values + i * V + columns, mask=columns < V, other=0.0)
        base -= tl.where(mask, key[:, None] * value[None, :], 0.0)
    return base


@triton.jit(do_not_specialize=["H", "G", "L"])
def gated_delta_step_kernel(
    q_, k_, v_, log_decay, beta_, level_weights, levels, log_scale, position, pending_keys,
    pending_values, o_, H, G, L,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BV columns of the states of one head."""
    bh = tl.program_id(0)
    b = bh // H
    group = b * G + bh % H // (H // G)
    t = tl.load(position + b).to(tl.int32)
    target = tl.where(t == 0, 0, bit_length(t & -t))  # the level that the carry fills, if any
    window = tl.maximum(t - 1, 0) // P * P  # when all levels were last written
    waiting = t - window  # slots 1 to waiting - 1 hold the tokens since
    rows = tl.arange(0, KP)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = columns < V
    at = rows[:, None] * V + columns[None, :]
    mask = (rows < K)[:, None] & inside[None, :]
    state = levels + bh.to(tl.int64) * L * (K * V)
    keys = pending_keys + bh * (P * K)
    values = pending_values + bh.to(tl.int64) * L * (P * V)
    scales = log_scale + bh * L
    weights = level_weights + bh * L
    g = tl.load(log_decay + bh).to(tl.float32)
    beta = tl.load(beta_ + bh).to(tl.float32)
    q = tl.load(q_ + group * K + rows, mask=rows < K, other=0.0).to(tl.float32)
    k = tl.load(k_ + group * K + rows, mask=rows < K, other=0.0).to(tl.float32)
    v = tl.load(v_ + bh * V + columns, mask=inside, other=0.0).to(tl.float32)
    o = tl.zeros((BV,), tl.float32)
    if target > 0:
        merged = tl.zeros((KP, BV), tl.float32)
        for l in range(target):
            bit = tl.maximum(l - 1, 0)
            written = tl.maximum((t - 1) >> bit << bit, window)
            first = tl.where(l == 0, waiting, written - window + 1)
            part = tl.load(state + l * (K * V) + at, mask=mask, other=0.0)
            part = _changed(
                part, keys, values + l * (P * V), first, waiting, rows, columns, mask, K, V
            )
            merged += part * tl.exp(tl.load(scales + l))
        held = tl.sum(k[:, None] * merged, 0)
        merged = (merged - k[:, None] * (beta * held)[None, :]) * tl.exp(g)
        o += tl.sum(q[:, None] * merged, 0) * tl.load(weights + target).to(tl.float32)
        tl.store(state + target * (K * V) + at, merged, mask=mask)

    slots = tl.arange(0, P)
    old = tl.load(
        keys + slots[:, None] * K + rows[None, :],
        mask=((slots >= 1) & (slots < waiting))[:, None] & (rows < K)[None, :], other=0.0,
    )  # fmt: skip
    k_old = tl.sum(old * k[None, :], 1)
    q_old = tl.sum(old * q[None, :], 1)
    q_new = tl.sum(q * k, 0)
    far = t >> target << target  # bits of the levels above the carry's
    count = 0
    for j in tl.static_range(31):
        count += (far >> j) & 1
    rest = far
    for _ in tl.range(0, count, num_stages=STAGES):
        low = rest & (-rest)
        l = bit_length(low)
        first = tl.maximum((t >> (l - 1) << (l - 1)) - window, 0) + 1
        held_by = values + l * (P * V)
        held_mask = ((slots >= first) & (slots < waiting))[:, None] & inside[None, :]
        held_at = held_by + slots[:, None] * V + columns[None, :]
        changes = tl.load(held_at, mask=held_mask, other=0.0)
        base = tl.load(state + l * (K * V) + at, mask=mask, other=0.0)
        held = tl.sum(k[:, None] * base, 0) - tl.sum(k_old[:, None] * changes, 0)
        read = tl.sum(q[:, None] * base, 0) - tl.sum(q_old[:, None] * changes, 0)
        change = beta * held
        weight = tl.load(weights + l).to(tl.float32) * tl.exp(tl.load(scales + l) + g)
        o += (read - q_new * change) * weight
        if t % P == 0:
            base = _changed(base, keys, held_by, first, waiting, rows, columns, mask, K, V)
            tl.store(state + l * (K * V) + at, base - k[:, None] * change[None, :], mask=mask)
        else:
            tl.store(held_by + t % P * V + columns, change, mask=inside)
        rest = rest - low
    new = k[:, None] * (beta * v)[None, :]
    o += tl.sum(q[:, None] * new, 0) * tl.load(weights).to(tl.float32)
    tl.debug_barrier()  # level 0 has been merged by every thread
    tl.store(state + at, new, mask=mask)
    # Slot 0 is read by nobody: at multiples of P nothing is left to wait.
    tl.store(keys + t % P * K + rows, k, mask=(rows < K) & (tl.program_id(1) == 0))
    tl.store(o_ + bh * V + columns, o.to(o_.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["H", "L"])
def gated_delta_scale_kernel(log_decay, log_scale, position, H, L, LP: tl.constexpr):
    """Decay of all heads of a row: once every program of the step has read what was before."""
    b = tl.program_id(0)
    t = tl.load(position + b).to(tl.int32)
    target = tl.where(t == 0, 0, bit_length(t & -t))
    l = tl.arange(0, LP)
    bit = tl.maximum(l - 1, 0)
    far = (l > target) & (((t >> bit) & 1) == 1)
    for h in range(H):
        bh = b * H + h
        g = tl.load(log_decay + bh).to(tl.float32)
        scale = tl.load(log_scale + bh * L + l, mask=l < L, other=0.0)
        tl.store(log_scale + bh * L + l, tl.where(far, scale + g, 0.0), mask=l < L)
    tl.debug_barrier()
    tl.store(position + b, (t + 1).to(tl.int64))


def gated_delta_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    state: PendingFenwickState,
) -> Tensor:
    """o [B, H, V] in v's dtype; `state` then holds the token. See op.py for the arguments."""
    B, G, K = q.shape
    H, V = v.shape[1:]
    L = level_weights.shape[2]
    KP = triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), max(16, STEP_TILE // KP))
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    log_decay = log_decay.contiguous()
    gated_delta_step_kernel[(B * H, triton.cdiv(V, BV))](
        q.contiguous(), k.contiguous(), v.contiguous(), log_decay, beta.contiguous(),
        level_weights.contiguous(), state.levels, state.log_scale, state.position, state.keys,
        state.values, o, H, G, L,
        K=K, KP=KP, V=V, BV=BV, P=PENDING, STAGES=STEP_STAGES, num_warps=STEP_WARPS,
    )  # fmt: skip
    gated_delta_scale_kernel[(B,)](
        log_decay, state.log_scale, state.position, H, L, LP=triton.next_power_of_2(L), num_warps=1
    )
    return o
