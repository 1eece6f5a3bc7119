"""Log-linear SSD backward in Triton: inside chunks, through nodes, gates. No atomics.

    inside, across  dP = do v^T of a half, and between halves: gradients of the compact weights,
                    of q k^T summed over heads, of the gates inside the chunk
    query           dq and the weights' gradients from the nodes that a chunk reads
    node, split     gradient of every node, q^T (weight do) over its readers
    down            from nodes to the state at the end of every chunk
    key_value       dv, and dk from the states
    key_query       dq, dk from the summed gradient of q k^T
    gates           dlevel_weights, dg

The gradient of g at a token is the sum of weight * gradient over all pairs (s, t) with s before
it and t not before it: pairs inside the chunk by row sums minus column sums, pairs that leave or
enter the chunk, and pairs that pass over it ("transit"): those that a node's merge carries over,
plus those of later readers in the same block. Taken apart so that no two large sums cancel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import scratch
from kernels.log_linear_ssd.launch import Shape, descriptor
from kernels.log_linear_ssd.triton_forward import Kept
from kernels.log_linear_ssd.triton_gates import gates_kernel
from kernels.log_linear_ssd.triton_nodes import down_kernel, node_kernel, query_kernel, split_kernel
from kernels.log_linear_ssd.triton_tiles import chunk_row, load_keys, load_node, load_values, weigh
from kernels.tree_plan import CHUNK, GROUP, Room, TreePlan
from kernels.triton_levels import same_block, selectors, selectors_transposed


@triton.jit(do_not_specialize=["NC", "H", "G", "HG"])
def inside_kernel(
    q_, k_, v_, do_, chunks, compact, to_block_end, dcompact, dg_inside, dscores,
    NC, H, G, HG,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Pairs of one half. dcompact is the gradient of the compact weights without their lambda."""
    part = tl.program_id(0) % (G * HG)
    pid = tl.program_id(0) // (G * HG)
    n = pid // 2
    upper = pid % 2
    group = part // HG
    token, length, _, _ = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    r = tl.arange(0, 64)
    row = token + upper * 64
    ok = r + upper * 64 < length
    q = load_keys(q_, row, ok, group, G, 64, K, KP, DOT)
    k = load_keys(k_, row, ok, group, G, 64, K, KP, DOT)
    scores = tl.dot(q, tl.trans(k), input_precision=IP)
    far, near = selectors(compact.dtype.element_ty)
    far_sum, near_sum = selectors_transposed(DOT)
    in_block = same_block()
    c16 = tl.arange(0, 16)
    total = tl.zeros((64, 64), tl.float32)
    for x in range(HEADS):
        h = group * (H // G) + part % HG * HEADS + x
        own = h * NS + n * C + upper * 64 + r
        dweighted = tl.zeros((64, 64), tl.float32)
        for vt in tl.static_range(V // BV):
            v = load_values(v_, row, ok, h, vt, H, 64, V, BV, DOT, TMA)
            do = load_values(do_, row, ok, h, vt, H, 64, V, BV, DOT, TMA)
            dweighted = tl.dot(do, tl.trans(v), dweighted, input_precision=IP)
        a = tl.load(compact + own[:, None] * 16 + c16[None, :])
        block_end = tl.load(to_block_end + own)
        weights = tl.where(
            in_block,
            tl.dot(a, near, input_precision=IP),
            tl.dot(a, far, input_precision=IP) * block_end[None, :],
        )
        total += dweighted * weights
        dweights = dweighted * scores
        masses = tl.where(r[:, None] == r[None, :], 0.0, dweights * weights)
        tl.store(dg_inside + own, tl.sum(masses, 1) - tl.sum(masses, 0))
        da = tl.dot((dweights * block_end[None, :]).to(DOT), far_sum, input_precision=IP)
        own_block = tl.where(in_block, dweights, 0.0).to(DOT)
        da = tl.dot(own_block, near_sum, da, input_precision=IP)
        tl.store(dcompact + own[:, None] * 16 + c16[None, :], da)
    at = ((part * NC.to(tl.int64) + n) * 2 + upper) * 4096
    tl.store(dscores + at + r[:, None] * 64 + r[None, :], total)


@triton.jit(do_not_specialize=["NC", "H", "G", "HG", "NL"])
def across_kernel(
    q_, k_, v_, do_, chunks, to_half_end, read_weights, dread_weights, dg_across, dscores,
    NC, H, G, HG, NL,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Pairs of the upper half with the lower: level 7, weight read_weights[0] x to_half_end."""
    part = tl.program_id(0) % (G * HG)
    n = tl.program_id(0) // (G * HG)
    group = part // HG
    token, length, _, _ = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    r = tl.arange(0, 64)
    row = token + 64
    lower = r < length
    ok = r + 64 < length
    q = load_keys(q_, row, ok, group, G, 64, K, KP, DOT)
    k = load_keys(k_, token, lower, group, G, 64, K, KP, DOT)
    scores = tl.dot(q, tl.trans(k), input_precision=IP)
    total = tl.zeros((64, 64), tl.float32)
    for x in range(HEADS):
        h = group * (H // G) + part % HG * HEADS + x
        slot = h * NS + n * C
        weights_at = h * NL * NS + n * C + 64 + r
        dweighted = tl.zeros((64, 64), tl.float32)
        for vt in tl.static_range(V // BV):
            v = load_values(v_, token, lower, h, vt, H, 64, V, BV, DOT, TMA)
            do = load_values(do_, row, ok, h, vt, H, 64, V, BV, DOT, TMA)
            dweighted = tl.dot(do, tl.trans(v), dweighted, input_precision=IP)
        dweighted = dweighted * tl.load(to_half_end + slot + r)[None, :]
        weight = tl.load(read_weights + weights_at)
        dscore = dweighted * weight[:, None]
        total += dscore
        dweight = tl.sum(dweighted * scores, 1)
        tl.store(dread_weights + weights_at, dweight)
        tl.store(dg_across + slot + 64 + r, dweight * weight)
        tl.store(dg_across + slot + r, -tl.sum(dscore * scores, 0))
    at = (part * NC.to(tl.int64) + n) * 4096
    tl.store(dscores + at + r[:, None] * 64 + r[None, :], total)


@triton.jit(do_not_specialize=["NC", "H", "G", "HG", "NL"])
def key_value_kernel(
    q_, k_, v_, do_, chunks, compact, to_block_end, to_half_end, to_chunk_end, read_weights,
    dstate, dv_, dk_parts, leaving, NC, H, G, HG, NL,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr, TMA: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """Keys and values of one half: read in their half, by the upper half, and through the state.
    leaving [H, slots]: mass of all pairs from the slot to later chunks."""
    part = tl.program_id(0) % (G * HG)
    n = tl.program_id(0) // (G * HG)
    group = part // HG
    token, length, _, _ = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    r = tl.arange(0, 64)
    row = token + UPPER * 64
    ok = r + UPPER * 64 < length
    upper_ok = r + 64 < length
    k = load_keys(k_, row, ok, group, G, 64, K, KP, DOT)
    q = load_keys(q_, row, ok, group, G, 64, K, KP, DOT)
    scores = tl.dot(k, tl.trans(q), input_precision=IP).to(DOT)
    if UPPER == 0:
        q = load_keys(q_, token + 64, upper_ok, group, G, 64, K, KP, DOT)
        upper_scores = tl.dot(k, tl.trans(q), input_precision=IP).to(DOT)
    far, near = selectors_transposed(compact.dtype.element_ty)
    in_block = same_block()
    c16 = tl.arange(0, 16)
    dk = tl.zeros((64, KP), tl.float32)
    for x in range(HEADS):
        h = group * (H // G) + part % HG * HEADS + x
        slot = h * NS + n * C
        own = slot + UPPER * 64 + r
        a = tl.trans(tl.load(compact + own[:, None] * 16 + c16[None, :]))
        block_end = tl.load(to_block_end + own)
        chunk_end = tl.load(to_chunk_end + own)
        mass = tl.zeros((64,), tl.float32)
        for vt in tl.static_range(V // BV):
            do = load_values(do_, row, ok, h, vt, H, 64, V, BV, DOT, TMA)
            v = load_values(v_, row, ok, h, vt, H, 64, V, BV, tl.float32, TMA)
            at = (h * NC.to(tl.int64) + n) * KP
            ds = load_node(dstate, at, vt, V, KP, BV, DOT, TMA)
            decayed = (v * chunk_end[:, None]).to(DOT)
            dk = tl.dot(decayed, tl.trans(ds), dk, input_precision=IP)
            dv = tl.dot(k, ds, input_precision=IP) * chunk_end[:, None]
            mass += tl.sum(dv * v, 1)
            weights = tl.where(
                in_block,
                tl.dot(near, a, input_precision=IP),
                tl.dot(far, a, input_precision=IP) * block_end[:, None],
            )
            dv = tl.dot(weigh(scores, weights), do, dv, input_precision=IP)
            if UPPER == 0:
                do = load_values(do_, token + 64, upper_ok, h, vt, H, 64, V, BV, DOT, TMA)
                half_end = tl.load(to_half_end + own)
                weight = tl.load(read_weights + h * NL * NS + n * C + 64 + r)
                weights = half_end[:, None] * weight[None, :]
                dv = tl.dot(weigh(upper_scores, weights), do, dv, input_precision=IP)
            to = dv_ + ((row + r) * H + h)[:, None] * V + vt * BV + tl.arange(0, BV)[None, :]
            tl.store(to, dv.to(dv_.dtype.element_ty), mask=ok[:, None])
        tl.store(leaving + own, mass)
    to = dk_parts + (part * NS + n * C + UPPER * 64 + r)[:, None] * KP
    tl.store(to + tl.arange(0, KP)[None, :], dk)


@triton.jit(do_not_specialize=["NC", "G", "HG"])
def key_query_kernel(
    q_, k_, chunks, dscores_inside, dscores_across, dq_parts, dk_parts, dq_, dk_, NC, G, HG,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One half's dq (program_id(2) = 0: dS k) or dk (1: dS^T q), plus the parts' sums."""
    n = tl.program_id(0) // 2
    upper = tl.program_id(0) % 2
    group = tl.program_id(1)
    of_key = tl.program_id(2)
    token, length, _, _ = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    r = tl.arange(0, 64)
    columns = tl.arange(0, KP)
    row = token + upper * 64
    ok = r + upper * 64 < length
    # The other half takes part in an upper row's dq and in a lower row's dk.
    both = upper == 1 - of_key
    other = token + (1 - upper) * 64
    other_ok = r + (1 - upper) * 64 < length
    if of_key == 0:
        at = r[:, None] * 64 + r[None, :]
        x = load_keys(k_, row, ok, group, G, 64, K, KP, DOT)
        y = load_keys(k_, other, other_ok, group, G, 64, K, KP, DOT)
    else:
        at = r[None, :] * 64 + r[:, None]
        x = load_keys(q_, row, ok, group, G, 64, K, KP, DOT)
        y = load_keys(q_, other, other_ok, group, G, 64, K, KP, DOT)
    inside = tl.zeros((64, 64), tl.float32)
    across = tl.zeros((64, 64), tl.float32)
    total = tl.zeros((64, KP), tl.float32)
    for i in range(HG):
        part = group * HG + i
        chunk = part * NC.to(tl.int64) + n
        inside += tl.load(dscores_inside + (chunk * 2 + upper) * 4096 + at)
        if both:
            across += tl.load(dscores_across + chunk * 4096 + at)
        slot = (part * NS + n * C + upper * 64 + r)[:, None] * KP + columns[None, :]
        if of_key == 0:
            total += tl.load(dq_parts + slot)
        else:
            total += tl.load(dk_parts + slot)
    total = tl.dot(inside.to(DOT), x, total, input_precision=IP)
    total = tl.dot(across.to(DOT), y, total, input_precision=IP)
    to = ((row + r) * G + group)[:, None] * K + columns[None, :]
    mask = ok[:, None] & (columns < K)[None, :]
    if of_key == 0:
        tl.store(dq_ + to, total.to(dq_.dtype.element_ty), mask=mask)
    else:
        tl.store(dk_ + to, total.to(dk_.dtype.element_ty), mask=mask)


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_weights: Tensor, do: Tensor,
    buffers: Sequence[Tensor], plan: TreePlan, room: Room,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dg (fp32), dlevel_weights for the gradient do [B, T, H, V] of `forward`'s o.

    buffers: as `forward` returned them.
    """
    s = Shape.of(q, v, level_weights)
    compact, floats, nodes = buffers
    kept = Kept.of(compact, floats, nodes, s, room)
    chunks, groups = room
    NC, NG, slots = plan.num_chunks, plan.num_groups, chunks * CHUNK
    heads = s.heads_per_program(s.table["inside"].heads, 2 * NC)
    HG = s.H // s.G // heads
    parts, node = s.G * HG, s.KP * s.V
    tma = s.table["inside"].tma
    sizes: dict[str, Any] = {"K": s.K, "KP": s.KP, "V": s.V, "BV": s.BV, "C": CHUNK}
    sizes |= {"DOT": s.dot, "IP": s.precision}
    v_tiles = descriptor(v, s.H * s.V, 64, s.BV) if tma else v
    do_tiles = descriptor(do, s.H * s.V, 64, s.BV) if tma else do

    per_slot = s.H * slots
    # [H, slots, 16], [H, NL, slots], [H, slots] three times
    dcompact, dread_weights, dg_inside, dg_across, leaving = scratch(
        s.device, 16 * per_slot, s.NL * per_slot, per_slot, per_slot, per_slot
    )
    # [parts, chunks, 2, 64, 64], [parts, chunks, 64, 64], [parts, slots, KP] twice,
    # [H, NL, chunks, 2], [H, chunks, tiles]
    dscores_inside, dscores_across, dq_parts, dk_parts, read_mass, merged = scratch(
        s.device, parts * chunks * 2 * 64 * 64, parts * chunks * 64 * 64, parts * slots * s.KP,
        parts * slots * s.KP, s.H * s.NL * chunks * 2, s.H * chunks * s.node_tiles,
    )  # fmt: skip
    s.launch(
        inside_kernel, (parts * NC * 2, 1, 1),
        q, k, v_tiles, do_tiles, plan.chunks, kept.compact, kept.to_block_end, dcompact,
        dg_inside, dscores_inside, chunks, s.H, s.G, HG,
        **sizes, HEADS=heads, TMA=tma,
    )  # fmt: skip
    s.launch(
        across_kernel, (parts * NC, 1, 1),
        q, k, v_tiles, do_tiles, plan.chunks, kept.to_half_end, kept.read_weights, dread_weights,
        dg_across, dscores_across, chunks, s.H, s.G, HG, s.NL,
        **sizes, HEADS=heads, TMA=tma,
    )  # fmt: skip
    s.launch(
        query_kernel, (parts * NC * 2, 1, 1),
        q, do_tiles, plan.chunks, kept.read_weights, dread_weights,
        descriptor(kept.nodes, s.V, s.KP, s.BV) if tma else kept.nodes, kept.node_total, dq_parts,
        read_mass, chunks, s.H, s.G, HG, s.NL,
        **sizes, HEADS=heads, TMA=tma, STAGES=s.table["query"].stages,
    )  # fmt: skip

    dnodes = torch.empty(s.H * chunks * node, device=s.device, dtype=s.compact_dtype)
    dgroups, dnode_scales = scratch(
        s.device, s.H * plan.group_slots * node, s.H * chunks * s.value_tiles
    )
    if items := len(plan.node_items):
        tma_q = tma and s.K == s.KP
        s.launch(
            node_kernel, (items * s.H * s.value_tiles, 1, 1),
            descriptor(q, s.G * s.K, 64, s.KP) if tma_q else q, do_tiles, plan.chunks,
            plan.node_items, kept.read_weights, kept.chunk_total, dnodes, dnode_scales, dgroups,
            chunks, plan.group_slots, s.H, s.G, s.NL,
            **sizes, TMA_Q=tma_q, TMA=tma, STAGES=s.table["node"].stages,
        )  # fmt: skip
    if splits := len(plan.split_nodes):
        s.launch(
            split_kernel, (s.node_tiles, splits, s.H),
            dgroups, plan.split_nodes, plan.group_slots,
            SIZE=node, BLOCK=s.node_block,
        )  # fmt: skip
    dstate = torch.empty(s.H * chunks * node, device=s.device, dtype=s.node_dtype)
    s.launch(
        down_kernel, (s.node_tiles, NG, s.H),
        dnodes, dnode_scales, dgroups, kept.nodes, kept.chunk_total, kept.group_total, plan.groups,
        dstate, merged, chunks, groups, plan.group_slots,
        SIZE=node, BLOCK=s.node_block, V=s.V, BV=s.BV, GROUP=GROUP,
    )  # fmt: skip
    del dnodes, dgroups, dnode_scales  # as large as v; dv can lie where they were

    dv = torch.empty_like(v)
    dstate_tiles = descriptor(dstate, s.V, s.KP, s.BV) if tma else dstate
    for upper in (0, 1):
        s.launch(
            key_value_kernel, (parts * NC, 1, 1),
            q, k, v_tiles, do_tiles, plan.chunks, kept.compact, kept.to_block_end,
            kept.to_half_end, kept.to_chunk_end, kept.read_weights, dstate_tiles, dv, dk_parts,
            leaving, chunks, s.H, s.G, HG, s.NL,
            **sizes, HEADS=heads, TMA=tma, UPPER=upper,
        )  # fmt: skip
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    s.launch(
        key_query_kernel, (NC * 2, s.G, 2),
        q, k, plan.chunks, dscores_inside, dscores_across, dq_parts, dk_parts, dq, dk,
        chunks, s.G, HG,
        K=s.K, KP=s.KP, C=CHUNK, DOT=s.dot, IP=s.precision,
    )  # fmt: skip
    dlevel_weights, dg = torch.empty_like(level_weights), torch.empty_like(g)
    s.launch(
        gates_kernel, (NC * s.H, 1, 1),
        g, plan.chunks, kept.read_weights, dread_weights, dcompact, dg_inside, dg_across, leaving,
        merged, read_mass, dlevel_weights, dg, chunks, s.H, s.L, s.NL,
        C=CHUNK, LP=max(16, triton.next_power_of_2(s.L)), TILES=s.node_tiles,
        TILES_PADDED=triton.next_power_of_2(s.node_tiles),
    )  # fmt: skip
    return dq, dk, dv, dg, dlevel_weights
