"""Log-linear gated delta rule forward in Triton: no loop over the chunks of a row.

    prepare, chunk   gates; the WY form of every chunk (triton_chunk.py)
    leaf, merge      the tree's nodes, level by level (triton_tree.py)
    weights          decay and lambda of every read
    query, carry     queries moved to their chunk's start, then past the nodes they have read
    out              o = (inside the chunk) + sum over read nodes of weight * (carried query U)

kernels/log_linear_gated_delta/pair_plan.py says which chunk reads which node. Arrays of ours are
[H, chunks, ...], inputs and outputs [tokens, ...].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import split, split_size
from kernels.log_linear_gated_delta.launch import PairShape
from kernels.log_linear_gated_delta.pair_plan import PairPlan
from kernels.log_linear_gated_delta.triton_chunk import (
    pair_chunk_kernel,
    pair_leaf_kernel,
    pair_prepare_kernel,
)
from kernels.log_linear_gated_delta.triton_tiles import (
    load_tokens,
    pair_chunk_row,
    pair_weights,
    tile_at,
)
from kernels.log_linear_gated_delta.triton_tree import (
    pair_carry_kernel,
    pair_merge_kernel,
    pair_query_kernel,
    pair_weights_kernel,
)
from kernels.triton_levels import bit_length


class KeptPairs(NamedTuple):
    """What the forward pass leaves for the backward pass, flat; in PairShape.node where nothing
    else is said. The carried queries, as large as half of it, are made again.

    compact [H, slots, 16]: lambda times decay of pairs in the chunk (see triton_tiles.py).
    coefficients [H, chunks, 64, 64]: P.  keys [H, chunks, K, 64]: k^T R.
    transitions [H, 2 chunks, K, K]: of left children by the chunk they end at, then of right ones
        by the chunk they begin at, without decay.
    states [H, chunks, K, V]: of left children, divided by their scale.
    inverse [H, chunks, 64, 64] fp32: R.
    block_end, chunk_end [H, slots] fp32: exp(sum of g after the slot) to the end of its block of 8,
        of its chunk.
    chunk_total, value_scale [H, chunks] fp32: g summed; a power of two that no |v| exceeds.
    read_weights [H, NL, slots] fp32: see pair_weights_kernel.
    node_total, node_scale [H, 2 chunks] fp32: g summed over all that a node covers; the scale of
        its state.
    """

    compact: Tensor
    coefficients: Tensor
    keys: Tensor
    transitions: Tensor
    states: Tensor
    inverse: Tensor
    block_end: Tensor
    chunk_end: Tensor
    chunk_total: Tensor
    value_scale: Tensor
    read_weights: Tensor
    node_total: Tensor
    node_scale: Tensor

    @staticmethod
    def buffers(s: PairShape, NC: int) -> tuple[Tensor, Tensor]:
        """Memory for all that is in PairShape.node, and for all that is fp32."""
        nodes, floats = _sizes(s, NC)
        return (
            torch.empty(split_size(*nodes), device=s.device, dtype=s.node),
            torch.empty(split_size(*floats), device=s.device, dtype=torch.float32),
        )

    @staticmethod
    def of(nodes: Tensor, floats: Tensor, s: PairShape, NC: int) -> "KeptPairs":
        """Views of the buffers that `buffers` makes."""
        sizes = _sizes(s, NC)
        return KeptPairs._make([*split(nodes, *sizes[0]), *split(floats, *sizes[1])])


def _sizes(s: PairShape, NC: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    chunks, slots = s.H * NC, s.H * NC * 64
    square = chunks * 64 * 64
    nodes = slots * 16, square, slots * s.K, 2 * chunks * s.K * s.K, chunks * s.K * s.V
    return nodes, (square, slots, slots, chunks, chunks, s.NL * slots, 2 * chunks, 2 * chunks)


@triton.jit(do_not_specialize=["NC", "NR", "H", "NL"])
def pair_out_kernel(
    v_, beta_, chunks, compact, block_end, read_weights, coefficients, carried, states, node_scale,
    o_, NC, NR, H, NL,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, GRAD: tl.constexpr, IP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    vt = tl.program_id(0) // H % (V // BN)
    n = tl.num_programs(0) // (H * (V // BN)) - 1 - tl.program_id(0) // (H * (V // BN))
    token, length, c, reads, _, _, row = pair_chunk_row(chunks, n)
    NS = NC.to(tl.int64) * 64
    i = tl.arange(0, 64)
    ok = i < length
    chunk = h * NC.to(tl.int64) + n
    queries = carried + (h * NR.to(tl.int64) + row) * (64 * K)
    e = c
    o = tl.zeros((64, BN), tl.float32)
    for _ in range(reads):
        low = e & (-e)
        state = states + (h * NC.to(tl.int64) + n - c + e) * (K * V)
        seen = tl.zeros((64, BN), tl.float32)
        for m in tl.range(0, K // 64, num_stages=STAGES):
            q = tl.load(queries + tile_at(0, m * 64, 64, 64, K))
            u = tl.load(state + tile_at(m * 64, vt * BN, 64, BN, V))
            seen = tl.dot(q, u, seen, input_precision=IP)
        weight = tl.load(read_weights + (h * NL + bit_length(low) - 1) * NS + n * 64 + i)
        scale = tl.load(node_scale + h * 2 * NC.to(tl.int64) + n - c + e)
        o += seen * (weight * scale)[:, None]
        queries += 64 * K
        e = e - low
    weights = pair_weights(compact, block_end, chunk * 64 + i)
    coefficient = tl.load(coefficients + chunk * 4096 + tile_at(0, 0, 64, 64, 64))
    beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
    v = load_tokens(v_, token, ok, h, H, vt, V, BN).to(tl.float32)
    weighed = (coefficient.to(tl.float32) * weights).to(GRAD)
    o = tl.dot(weighed, (v * beta[:, None]).to(GRAD), o, input_precision=IP)
    to = o_ + ((token + i) * H + h)[:, None] * V + vt * BN + tl.arange(0, BN)[None, :]
    tl.store(to, o.to(o_.dtype.element_ty), mask=ok[:, None])


def carried_queries(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    s: PairShape,
    kept: KeptPairs,
    plan: PairPlan,
    NC: int,
    far: bool,
) -> Tensor:
    """[H, rows, 64, K], flat: the queries of every read, past the nodes that come before it."""
    types, BN = s.products, s.columns("carry")
    NR = max(1, plan.num_rows)
    carried = torch.empty(s.H * NR * 64 * s.K, device=s.device, dtype=s.node)
    s.launch(
        pair_query_kernel, (plan.num_chunks * (s.K // 64) * s.H, 1, 1),
        q, k, beta, plan.chunks, kept.coefficients, carried, NC, NR, s.H, s.G, int(far),
        K=s.K, NODE=types["NODE"], IP=types["IP"],
    )  # fmt: skip
    for begin, end in plan.read_levels:
        if begin == end:
            continue
        s.launch(
            pair_carry_kernel, ((end - begin) * (s.K // BN) * s.H, 1, 1),
            plan.reads, kept.transitions, carried, NC, NR, s.H, begin,
            K=s.K, BN=BN, NODE=types["NODE"], IP=types["IP"], STAGES=s.table["carry"].stages,
        )  # fmt: skip
    return carried


def pair_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, level_weights: Tensor,
    plan: PairPlan, NC: int, far: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:  # fmt: skip
    """o [B, T, H, V] in v's dtype; with `far` the queries carried to their document's first token
    [H, num_chunks, 64, K]; the buffers of `KeptPairs` for the backward pass.

    Args:
        q, k [B, T, G, K], v [B, T, H, V], g, beta [B, T, H], level_weights [B, T, H, L], all
            contiguous; K and V multiples of 64.
        plan: of the documents in these B * T tokens.
        NC: chunks to make room for, at least the plan's.
    """
    s = PairShape.of(q, v, level_weights)
    buffers = KeptPairs.buffers(s, NC)
    kept = KeptPairs.of(*buffers, s, NC)
    types, grid = s.products, (plan.num_chunks * s.H, 1, 1)
    s.launch(
        pair_prepare_kernel, grid,
        g, v, level_weights, plan.chunks, kept.compact, kept.block_end, kept.chunk_end,
        kept.chunk_total, kept.value_scale, NC, s.H, s.L,
        V=s.V,
    )  # fmt: skip
    s.launch(
        pair_chunk_kernel, grid,
        q, k, beta, plan.chunks, kept.inverse, kept.coefficients, kept.keys, NC, s.H, s.G,
        K=s.K, NODE=types["NODE"], GRAD=types["GRAD"], IP=types["IP"],
    )  # fmt: skip
    _make_nodes(k, v, beta, s, kept, plan, NC)
    s.launch(
        pair_weights_kernel, grid,
        g, level_weights, plan.chunks, kept.node_total, kept.read_weights, NC, s.H, s.L, s.NL,
    )  # fmt: skip
    carried = carried_queries(q, k, beta, s, kept, plan, NC, far)
    o, BN = torch.empty_like(v), s.columns("out")
    s.launch(
        pair_out_kernel, (plan.num_chunks * (s.V // BN) * s.H, 1, 1),
        v, beta, plan.chunks, kept.compact, kept.block_end, kept.read_weights, kept.coefficients,
        carried, kept.states, kept.node_scale, o, NC, max(1, plan.num_rows), s.H, s.NL,
        K=s.K, V=s.V, BN=BN, GRAD=types["GRAD"], IP=types["IP"], STAGES=s.table["out"].stages,
    )  # fmt: skip
    return o, _far_rows(carried, s, plan) if far else None, buffers


def _make_nodes(
    k: Tensor, v: Tensor, beta: Tensor, s: PairShape, kept: KeptPairs, plan: PairPlan, NC: int
) -> None:
    """Fills the tree. States of right children are needed until they are merged."""
    types, BN = s.products, s.columns("merge")
    right_states = torch.empty_like(kept.states)
    s.launch(
        pair_leaf_kernel, (plan.num_chunks * (s.K // 64) * s.H, 1, 1),
        k, v, beta, plan.chunks, kept.keys, kept.chunk_end, kept.chunk_total, kept.value_scale,
        kept.transitions, kept.states, right_states, kept.node_total, kept.node_scale, NC, s.H, s.G,
        K=s.K, V=s.V, NODE=types["NODE"], IP=types["IP"],
    )  # fmt: skip
    for begin, end in plan.merge_levels:
        if begin == end:
            continue
        s.launch(
            pair_merge_kernel, ((end - begin) * (s.K // 64) * ((s.K + s.V) // BN) * s.H, 1, 1),
            plan.merges, kept.transitions, kept.states, right_states, kept.node_total,
            kept.node_scale, NC, s.H, begin,
            K=s.K, V=s.V, BN=BN, NODE=types["NODE"], IP=types["IP"],
            STAGES=s.table["merge"].stages,
        )  # fmt: skip


def _far_rows(carried: Tensor, s: PairShape, plan: PairPlan) -> Tensor:
    """[H, num_chunks, 64, K] of rows [H, rows, 64, K]: the last row of every chunk."""
    rows = (plan.chunks[:, 6] + plan.chunks[:, 3]).long()
    return carried[: s.H * plan.num_rows * 64 * s.K].view(s.H, -1, 64, s.K).index_select(1, rows)
