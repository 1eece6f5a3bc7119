"""Log-linear gated delta rule backward in Triton. No atomics, no loop over a row's chunks.

prepare, chunk, weights, carry   what the forward pass did not keep (triton_forward.py)
walk                 from the farthest node of a chunk to the nearest, level by level
sum, split           gradient of every node from its readers
left, right          from parents to children, level by level (triton_nodes.py)
state, inside        gradients of carried keys; of the [C, C] matrices (triton_inside.py)
values, keys         dv, dq, dk
gates                dlevel_weights, dg, dbeta (triton_gates.py)
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kernels.launching import scratch
from kernels.log_linear_gated_delta.launch import PairShape
from kernels.log_linear_gated_delta.pair_plan import PairPlan
from kernels.log_linear_gated_delta.triton_forward import KeptPairs, carried_queries
from kernels.log_linear_gated_delta.triton_gates import pair_gates_kernel
from kernels.log_linear_gated_delta.triton_inside import (
    pair_inside_kernel,
    pair_keys_kernel,
    pair_state_kernel,
    pair_values_kernel,
)
from kernels.log_linear_gated_delta.triton_nodes import (
    pair_left_kernel,
    pair_right_kernel,
    pair_split_kernel,
    pair_sum_kernel,
    pair_walk_kernel,
)


def pair_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, level_weights: Tensor, do: Tensor,
    dfar: Tensor | None, buffers: Sequence[Tensor], plan: PairPlan, NC: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk, dv, dg (fp32), dbeta, dlevel_weights for the gradients of `pair_forward`'s outputs.

    do: [B, T, H, V];  dfar: [H, num_chunks, 64, K] or None, as `pair_forward` was called.
    buffers: as `pair_forward` returned them.
    """
    s = PairShape.of(q, v, level_weights)
    far = dfar is not None
    kept = KeptPairs.of(buffers[0], buffers[1], s, NC)
    carried = carried_queries(q, k, beta, s, kept, plan, NC, far)
    types, KV = s.products, s.K * (s.K + s.V)
    NODE, GRAD, IP, FINE = types["NODE"], types["GRAD"], types["IP"], types["FINE"]
    slots, tiles = NC * 64, (s.K // 64) * (s.V // 64)

    per_slot, matrices = s.H * slots, s.H * NC
    dread_weights, read_mass, merged = scratch(
        s.device, s.NL * per_slot, s.H * s.NL * NC, s.H * NC * tiles
    )
    dqueries = torch.empty(per_slot * s.K, device=s.device, dtype=s.gradient)
    dtransitions, dstates = _scaled(s, matrices, s.K, s.K), _scaled(s, matrices, s.K, s.V)
    dnodes = *dtransitions, *dstates
    _through_reads(s, do, dfar, kept, carried, dqueries, dread_weights, read_mass, dnodes, plan, NC)
    del carried, dnodes  # memory of which the rest makes use
    right_dtransitions = _scaled(s, matrices, s.K, s.K)
    for begin, end in reversed(plan.merge_levels):
        if begin == end:
            continue
        through = (
            plan.merges, kept.transitions, kept.states, kept.node_total, kept.node_scale,
            *dtransitions, *right_dtransitions, *dstates,
        )  # fmt: skip
        s.launch(
            pair_right_kernel, ((end - begin) * (s.K // 64) ** 2 * s.H, 1, 1),
            *through, NC, s.H, begin,
            K=s.K, V=s.V, FINE=FINE, STAGES=s.table["right"].stages,
        )  # fmt: skip
        s.launch(
            pair_left_kernel, ((end - begin) * (KV // 4096) * s.H, 1, 1),
            *through, merged, NC, s.H, begin,
            K=s.K, V=s.V, FINE=FINE, STAGES=s.table["left"].stages,
        )  # fmt: skip

    dkeys = _scaled(s, matrices, 64, s.K)
    s.launch(
        pair_state_kernel, (plan.num_chunks * (s.K // 64) * s.H, 1, 1),
        k, v, beta, plan.chunks, kept.chunk_end, *dtransitions, *right_dtransitions, *dstates,
        *dkeys, NC, s.H, s.G,
        K=s.K, V=s.V, NODE=NODE, FINE=FINE, STAGES=s.table["state"].stages,
    )  # fmt: skip
    dcompact, dg_inside, leaving, dbeta_values, dbeta_keys, dscores, doverlap = scratch(
        s.device, 16 * per_slot, per_slot, per_slot * (s.V // 64), per_slot * (s.V // 64),
        per_slot * (s.K // 64), per_slot * 64, per_slot * 64,
    )  # fmt: skip
    s.launch(
        pair_inside_kernel, (plan.num_chunks * s.H, 1, 1),
        k, v, beta, do, plan.chunks, kept.compact, kept.block_end, kept.inverse,
        kept.coefficients, kept.keys, *dkeys, dqueries, dcompact, dg_inside, dscores, doverlap,
        NC, s.H, s.G, int(far),
        K=s.K, V=s.V, GRAD=GRAD, IP=IP, FINE=FINE,
    )  # fmt: skip
    dv = torch.empty_like(v)
    s.launch(
        pair_values_kernel, (plan.num_chunks * (s.V // 64) * s.H, 1, 1),
        v, beta, do, plan.chunks, kept.compact, kept.block_end, kept.chunk_end,
        kept.coefficients, kept.keys, *dstates, dv, leaving, dbeta_values, NC, s.H,
        K=s.K, V=s.V, GRAD=GRAD, IP=IP, FINE=FINE,
    )  # fmt: skip
    del dstates
    B, T = v.shape[:2]
    # One head's dq and dk, summed over the heads of a group where there are several.
    heads_dtype = q.dtype if s.G == s.H else torch.float32
    dq, dk = (torch.empty(B, T, s.H, s.K, device=s.device, dtype=heads_dtype) for _ in range(2))
    s.launch(
        pair_keys_kernel, (plan.num_chunks * (s.K // 64) * s.H, 1, 1),
        q, k, beta, plan.chunks, kept.inverse, kept.coefficients, kept.keys, *dkeys, dqueries,
        *dtransitions, *right_dtransitions, dscores, doverlap, dq, dk, dbeta_keys, NC, s.H, s.G,
        int(far),
        K=s.K, FINE=FINE,
    )  # fmt: skip
    if s.G != s.H:
        dq, dk = (x.unflatten(2, (s.G, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    dlevel_weights, dg, dbeta = (torch.empty_like(x) for x in (level_weights, g, beta))
    s.launch(
        pair_gates_kernel, (plan.num_chunks * s.H, 1, 1),
        g, plan.chunks, kept.node_total, kept.read_weights, dread_weights, dcompact, dg_inside,
        leaving, merged, read_mass, dbeta_values, dbeta_keys, dlevel_weights, dg, dbeta, NC, s.H,
        s.L, s.NL,
        LP=max(16, triton.next_power_of_2(s.L)), TILES=tiles,
        TILES_PADDED=triton.next_power_of_2(tiles), VALUE_TILES=s.V // 64, KEY_TILES=s.K // 64,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, dlevel_weights


def _scaled(s: PairShape, matrices: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Memory for matrices [rows, columns] whose tiles of 64 by 64 have scales, and for those."""
    size = matrices * rows * columns
    tiles = torch.empty(size, device=s.device, dtype=s.node)
    return tiles, torch.empty(size // 4096, device=s.device, dtype=torch.float32)


def _through_reads(
    s: PairShape, do: Tensor, dfar: Tensor | None, kept: KeptPairs, carried: Tensor,
    dqueries: Tensor, dread_weights: Tensor, read_mass: Tensor, dnodes: tuple[Tensor, ...],
    plan: PairPlan, NC: int,
) -> None:  # fmt: skip
    """Fills the gradients of queries and read weights, and dnodes, those of left children with
    their scales, as far as their readers send them."""
    types, BN, KV = s.products, s.columns("sum"), s.K * (s.K + s.V)
    NR, NP = max(1, plan.num_rows), max(1, plan.num_partials)
    dcarried = torch.empty_like(carried, dtype=s.gradient)
    if dfar is not None:
        first, reads = plan.chunks[:, 6].long(), plan.chunks[:, 3]
        dfar = dfar.to(s.gradient)
        rows = dcarried[: s.H * plan.num_rows * 64 * s.K].view(s.H, -1, 64, s.K)
        rows.index_copy_(1, first + reads, dfar)
        # Chunks that read no node: the row is both the first and the last.
        dqueries[: s.H * NC * 64 * s.K].view(s.H, NC, 64, s.K)[:, : plan.num_chunks] = dfar
    for level in reversed(range(len(plan.read_levels))):
        begin, end = plan.read_levels[level]
        if begin == end:
            continue
        s.launch(
            pair_walk_kernel, ((end - begin) * s.H, 1, 1),
            do, plan.chunks, plan.reads, kept.transitions, kept.states, kept.node_scale,
            kept.read_weights, carried, dcarried, dqueries, dread_weights, read_mass, NC, NR, s.H,
            s.NL, begin, level,
            K=s.K, V=s.V, GRAD=types["GRAD"], IP=types["IP"], STAGES=s.table["walk"].stages,
        )  # fmt: skip
    (partials,) = scratch(s.device, s.H * plan.num_partials * KV)
    if items := len(plan.sums):
        s.launch(
            pair_sum_kernel, (items * (s.K // 64) * ((s.K + s.V) // BN) * s.H, 1, 1),
            do, plan.chunks, plan.reads, plan.sums, kept.read_weights, carried, dcarried,
            *dnodes, partials, NC, NR, NP, s.H, s.NL,
            K=s.K, V=s.V, BN=BN, GRAD=types["GRAD"], IP=types["IP"],
            STAGES=s.table["sum"].stages,
        )  # fmt: skip
    if splits := len(plan.splits):
        s.launch(
            pair_split_kernel, (splits * (KV // 4096) * s.H, 1, 1),
            plan.splits, partials, *dnodes, NC, NP, s.H,
            K=s.K, V=s.V,
        )  # fmt: skip
