"""Log-linear SSD forward in Triton: prepare, leaf, up, out. No loop over the chunks of a row.

    prepare  gates summed inside a chunk (fp64), level weights made ready for each use
    leaf     the state of every chunk and the nodes of up to 4 chunks, a group of 8 a program
    up       nodes of 8 and more chunks: decayed sums of the groups' states
    out      o = (inside the chunk) + sum over read nodes of weight * (q node)

kernels/tree_plan.py says which chunk reads which node; triton_tiles.py how weights are kept.
Slots are 128 for each chunk: arrays of ours are [H, slots], inputs and outputs [tokens, ...].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import scratch, split, split_size
from kernels.log_linear_ssd.launch import Shape, descriptor
from kernels.log_linear_ssd.triton_tiles import (
    chunk_row,
    load_keys,
    load_node,
    load_values,
    running_totals,
    weigh,
)
from kernels.tree_plan import CHUNK, GROUP, Room, TreePlan
from kernels.triton_levels import bit_length, decay_over, same_block, selectors


class Kept(NamedTuple):
    """What the forward pass leaves for the backward pass, flat; fp32 where nothing else is said.

    compact [H, slots, 16]: weights inside a half, see triton_tiles.py; fp16 (fp32 for fp32).
    to_block_end, to_half_end, to_chunk_end [H, slots]: exp(sum of g after the slot) up to the end
        of its block of 8, of its chunk's lower half (zero in the upper half), of its chunk.
    read_weights [H, max(1, L - 7), slots]: [0] lambda exp(g summed from the chunk's middle) for
        level 7; [1 + j] lambda exp(g summed from the chunk's start) for chunk level j.
    chunk_total, node_total [H, chunks], group_total [H, groups]: g summed over all they cover.
    nodes [H, chunks, KP, V] in the dtype of the products: k^T v of all that a node covers, decayed
        to its end.
    """

    compact: Tensor
    to_block_end: Tensor
    to_half_end: Tensor
    to_chunk_end: Tensor
    read_weights: Tensor
    chunk_total: Tensor
    node_total: Tensor
    group_total: Tensor
    nodes: Tensor

    @staticmethod
    def of(compact: Tensor, floats: Tensor, nodes: Tensor, s: Shape, room: Room) -> "Kept":
        """Views of the three buffers that `buffers` makes."""
        return Kept._make([compact, *split(floats, *_float_sizes(s, room)), nodes])

    @staticmethod
    def buffers(s: Shape, room: Room) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for compact, for all that is fp32, and for nodes."""
        slots = room.chunks * CHUNK
        floats = split_size(*_float_sizes(s, room))
        node = s.KP * s.V
        return (
            torch.empty(s.H * slots * 16, device=s.device, dtype=s.compact_dtype),
            torch.empty(floats, device=s.device, dtype=torch.float32),
            torch.empty(s.H * room.chunks * node, device=s.device, dtype=s.node_dtype),
        )


def _float_sizes(s: Shape, room: Room) -> tuple[int, ...]:
    per_slot, per_chunk = s.H * room.chunks * CHUNK, s.H * room.chunks
    return per_slot, per_slot, per_slot, s.NL * per_slot, per_chunk, per_chunk, s.H * room.groups


@triton.jit(do_not_specialize=["NC", "H", "L", "NL"])
def prepare_kernel(
    g_, level_weights, chunks, compact, to_block_end, to_half_end, to_chunk_end, read_weights,
    chunk_total, NC, H, L, NL,
    C: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    token, length, c, _ = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    i = tl.arange(0, C)
    ok = i < length
    at = (token + i) * H + h
    slot = h * NS + n * C + i
    g = tl.load(g_ + at, mask=ok, other=0.0)
    total, far_total, near_total, own_end, middle, end = running_totals(g, C)
    r = (i & 63)[:, None]
    k = tl.arange(0, 8)[None, :]
    to = compact + slot[:, None] * 16 + k
    seen = ok[:, None] & (k < (r >> 3))
    at_level = at[:, None] * L + bit_length(r ^ (8 * k + 7))
    weight = tl.load(level_weights + at_level, mask=seen, other=0.0).to(tl.float32)
    weight = weight * decay_over(total[:, None] - far_total)
    tl.store(to, tl.where(seen, weight, 0.0).to(compact.dtype.element_ty))
    seen = ok[:, None] & (k <= (r & 7))
    at_level = at[:, None] * L + bit_length((r & 7) ^ k)
    weight = tl.load(level_weights + at_level, mask=seen, other=0.0).to(tl.float32)
    weight = weight * decay_over(total[:, None] - near_total)
    tl.store(to + 8, tl.where(seen, weight, 0.0).to(compact.dtype.element_ty))

    tl.store(to_block_end + slot, decay_over(own_end - total))
    tl.store(to_half_end + slot, tl.where(i < 64, decay_over(middle - total), 0.0))
    tl.store(to_chunk_end + slot, decay_over(end - total))
    tl.store(chunk_total + h * NC + n, end.to(tl.float32))

    upper = ok & (i >= 64)
    weight = tl.load(level_weights + at * L + 7, mask=upper & (L > 7), other=0.0).to(tl.float32)
    to = read_weights + h * NL * NS + n * C + i
    tl.store(to, tl.where(upper, weight * decay_over(total - middle), 0.0))
    decay = decay_over(total)
    for j in range(NL - 1):
        if ((c >> j) & 1) == 1:
            weight = tl.load(level_weights + at * L + 8 + j, mask=ok, other=0.0).to(tl.float32)
            tl.store(to + (1 + j) * NS, weight * decay)


@triton.jit(do_not_specialize=["NC", "NG", "H", "G"])
def leaf_kernel(
    k_, v_, groups, chunks, to_chunk_end, chunk_total, nodes, node_total, states, group_total,
    NC, NG, H, G,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
    TMA_K: tl.constexpr, TMA_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """k^T (v decayed to the chunk's end), merged as a binary counter merges."""
    h = tl.program_id(0) % H
    tile = tl.program_id(0) // H % ((KP // BK) * (V // BV))
    gn = tl.program_id(0) // (H * (KP // BK) * (V // BV))
    kt = tile % (KP // BK)
    vt = tile // (KP // BK)
    base = tl.load(groups + gn * 6)
    begin = tl.load(groups + gn * 6 + 1)
    end = tl.load(groups + gn * 6 + 2)
    slot0 = h * NC.to(tl.int64)
    i = tl.arange(0, C)
    rows = kt * BK + tl.arange(0, BK)
    columns = vt * BV + tl.arange(0, BV)
    group = h // (H // G)
    token0 = tl.load(chunks + (base + begin) * 6).to(tl.int64)
    tokens = tl.load(chunks + (base + end - 1) * 6 + 1) + (end - 1 - begin) * C
    s0 = tl.zeros((BK, BV), tl.float32)
    s1 = tl.zeros((BK, BV), tl.float32)
    s2 = tl.zeros((BK, BV), tl.float32)
    t0 = 0.0
    t1 = 0.0
    t2 = 0.0
    for x in tl.range(begin, end, num_stages=STAGES):
        n = base + x
        token = token0 + (x - begin) * C
        ok = (x - begin) * C + i < tokens
        if TMA_K:
            k = k_.load([token.to(tl.int32), group * K + kt * BK]).to(DOT)
        else:
            mask = ok[:, None] & (rows < K)[None, :]
            k = tl.load(k_ + ((token + i) * G + group)[:, None] * K + rows[None, :], mask=mask,
                        other=0.0).to(DOT)  # fmt: skip
        v = load_values(v_, token, ok, h, vt, H, C, V, BV, tl.float32, TMA_V)
        total = tl.load(chunk_total + slot0 + n)
        to_end = tl.load(to_chunk_end + (slot0 + n) * C + i)
        state = tl.dot(tl.trans(k), (v * to_end[:, None]).to(DOT), input_precision=IP)
        if (x & 1) == 0:
            s0 = state
            t0 = total
        else:
            state = s0 * tl.exp(total) + state
            total = t0 + total
            if (x & 2) == 0:
                s1 = state
                t1 = total
            else:
                state = s1 * tl.exp(total) + state
                total = t1 + total
                if (x & 4) == 0:
                    s2 = state
                    t2 = total
                else:
                    state = s2 * tl.exp(total) + state
                    total = t2 + total
        if x == GROUP - 1:
            to = states + ((h * NG + gn).to(tl.int64) * KP + rows)[:, None] * V + columns[None, :]
            tl.store(to, state)
            tl.store(group_total + h * NG + gn, total)
        else:
            if x + 1 < end:
                to = nodes + ((slot0 + n + 1) * KP + rows)[:, None] * V + columns[None, :]
                tl.store(to, state.to(nodes.dtype.element_ty))
                tl.store(node_total + slot0 + n + 1, total)


@triton.jit(do_not_specialize=["NC", "NG"])
def up_kernel(
    states, group_total, groups, nodes, node_total, NC, NG,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The node at the start of a group: the lowbit(g) groups before it, each decayed to it."""
    gn = tl.num_programs(1) - 1 - tl.program_id(1)
    h = tl.program_id(2).to(tl.int64)
    g = tl.load(groups + gn * 6 + 3)
    before = g - tl.load(groups + gn * 6 + 4)
    if before > 0:
        x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        node = tl.zeros((BLOCK,), tl.float32)
        total = 0.0
        for s in tl.range(1, tl.minimum(g & (-g), before) + 1, num_stages=3):
            node += tl.exp(total) * tl.load(states + (h * NG + gn - s) * SIZE + x)
            total += tl.load(group_total + h * NG + gn - s)
        n = tl.load(groups + gn * 6)
        tl.store(nodes + (h * NC + n) * SIZE + x, node.to(nodes.dtype.element_ty))
        tl.store(node_total + h * NC + n, total)


@triton.jit(do_not_specialize=["NC", "H", "G", "HG", "NL"])
def out_kernel(
    q_, k_, v_, chunks, compact, to_block_end, to_half_end, read_weights, nodes, node_total, o_,
    NC, H, G, HG, NL,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr, TMA_V: tl.constexpr,
    TMA_NODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One half of a chunk for HEADS heads of a group: q k^T is made once for all of them."""
    part = tl.program_id(0) % (G * HG)
    pid = tl.program_id(0) // (G * HG)
    upper = pid % 2
    n = (tl.num_programs(0) // (G * HG) - 1 - pid) // 2
    group = part // HG
    h0 = group * (H // G) + part % HG * HEADS
    token, length, c, reads = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    r = tl.arange(0, 64)
    row = token + upper * 64
    ok = r + upper * 64 < length
    lower_ok = r < length
    q = load_keys(q_, row, ok, group, G, 64, K, KP, DOT)
    k = load_keys(k_, row, ok, group, G, 64, K, KP, DOT)
    scores = tl.dot(q, tl.trans(k), input_precision=IP).to(DOT)
    k = load_keys(k_, token, lower_ok, group, G, 64, K, KP, DOT)
    lower_scores = tl.dot(q, tl.trans(k), input_precision=IP).to(DOT)
    far, near = selectors(compact.dtype.element_ty)
    in_block = same_block()
    c16 = tl.arange(0, 16)
    for x in range(HEADS * (V // BV)):
        h = h0 + x // (V // BV)
        vt = x % (V // BV)
        slot = h * NS + n * C
        own = slot + upper * 64 + r
        v = load_values(v_, row, ok, h, vt, H, 64, V, BV, DOT, TMA_V)
        a = tl.load(compact + own[:, None] * 16 + c16[None, :])
        block_end = tl.load(to_block_end + own)
        lower_v = load_values(v_, token, lower_ok, h, vt, H, 64, V, BV, DOT, TMA_V)
        half_end = tl.load(to_half_end + slot + r)
        weights_at = h * NL * NS + n * C + upper * 64 + r
        level_7 = tl.load(read_weights + weights_at)
        e = c
        nearer = 0.0
        o = tl.zeros((64, BV), tl.float32)
        for _ in tl.range(0, reads, num_stages=STAGES):
            low = e & (-e)
            at = h * NC.to(tl.int64) + n - c + e
            node = load_node(nodes, at * KP, vt, V, KP, BV, DOT, TMA_NODE)
            weight = tl.load(read_weights + weights_at + bit_length(low) * NS)
            decay = tl.exp(nearer)
            nearer += tl.load(node_total + at)
            o += tl.dot(q, node, input_precision=IP) * (weight * decay)[:, None]
            e = e - low
        weights = tl.where(
            in_block,
            tl.dot(a, near, input_precision=IP),
            tl.dot(a, far, input_precision=IP) * block_end[None, :],
        )
        o = tl.dot(weigh(scores, weights), v, o, input_precision=IP)
        weights = half_end[None, :] + tl.zeros((64, 64), tl.float32)
        across = tl.dot(weigh(lower_scores, weights), lower_v, input_precision=IP)
        # Also for a lower half, whose result is dropped: a branch here costs more (measured).
        o += tl.where(upper == 1, across * level_7[:, None], 0.0)
        to = o_ + ((row + r) * H + h)[:, None] * V + vt * BV + tl.arange(0, BV)[None, :]
        tl.store(to, o.to(o_.dtype.element_ty), mask=ok[:, None])


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_weights: Tensor, plan: TreePlan, room: Room
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """o [B, T, H, V] in v's dtype, and the buffers of `Kept` for the backward pass.

    Args:
        q, k [B, T, G, K], v [B, T, H, V], g [B, T, H], level_weights [B, T, H, L], all contiguous.
        plan: of the documents in these B * T tokens.
        room: chunks and groups to make room for, at least the plan's.
    """
    s = Shape.of(q, v, level_weights)
    buffers = Kept.buffers(s, room)
    kept = Kept.of(*buffers, s, room)
    NC, NG = plan.num_chunks, plan.num_groups
    chunks, groups = room
    o = torch.empty_like(v)
    s.launch(
        prepare_kernel, (NC * s.H, 1, 1),
        g, level_weights, plan.chunks, *kept[:6], chunks, s.H, s.L, s.NL,
        C=CHUNK,
    )  # fmt: skip
    (states,) = scratch(s.device, s.H * groups * s.KP * s.V)
    way, BK = s.table["leaf"], min(s.KP, 64)
    tma_k = way.tma and s.K == s.KP
    s.launch(
        leaf_kernel, (NG * (s.KP // BK) * s.value_tiles * s.H, 1, 1),
        descriptor(k, s.G * s.K, CHUNK, BK) if tma_k else k,
        descriptor(v, s.H * s.V, CHUNK, s.BV) if way.tma else v,
        plan.groups, plan.chunks, kept.to_chunk_end, kept.chunk_total, kept.nodes,
        kept.node_total, states, kept.group_total, chunks, groups, s.H, s.G,
        K=s.K, KP=s.KP, V=s.V, BK=BK, BV=s.BV, C=CHUNK, GROUP=GROUP, DOT=s.dot, IP=s.precision,
        TMA_K=tma_k, TMA_V=way.tma, STAGES=way.stages,
    )  # fmt: skip
    if NG > 1:
        s.launch(
            up_kernel, (s.node_tiles, NG, s.H),
            states, kept.group_total, plan.groups, kept.nodes, kept.node_total, chunks, groups,
            SIZE=s.KP * s.V, BLOCK=s.node_block,
        )  # fmt: skip
    way = s.table["out"]
    heads = s.heads_per_program(way.heads, 2 * NC)
    s.launch(
        out_kernel, (s.H // heads * NC * 2, 1, 1),
        q, k, descriptor(v, s.H * s.V, 64, s.BV) if way.tma else v, plan.chunks,
        kept.compact, kept.to_block_end, kept.to_half_end, kept.read_weights, kept.nodes,
        kept.node_total, o, chunks, s.H, s.G, s.H // s.G // heads, s.NL,
        K=s.K, KP=s.KP, V=s.V, BV=s.BV, C=CHUNK, HEADS=heads, DOT=s.dot, IP=s.precision,
        TMA_V=way.tma, TMA_NODE=False, STAGES=way.stages,
    )  # fmt: skip
    return o, buffers
