"""The gated delta rule across chunks, in Triton: the tree's nodes and the queries that read them.

A node is a transition M [K, K] without decay and a state U [K, V] decayed to the node's end, which
is kept divided by a power of two of its own. Two neighbours merge to

    M = M_r M_l        U = exp(total_r) M_r U_l + U_r

and a query that has read a node goes on to the farther one as q M. All merges, and all queries, of
one level of the tree are one launch: log2 of the chunks of the longest document.
"""

import triton
import triton.language as tl

from kernels.log_linear_gated_delta.triton_tiles import (
    gate_totals,
    load_tokens,
    pair_chunk_row,
    tile_at,
)
from kernels.triton_levels import bit_length


@triton.jit(do_not_specialize=["NC", "H", "BEGIN"])
def pair_merge_kernel(
    merges, transitions, states, right_states, node_total, node_scale, NC, H, BEGIN,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, NODE: tl.constexpr, IP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of 64 rows of one parent: columns of its transition, then of its state."""
    TILES: tl.constexpr = (K + V) // BN
    h = tl.program_id(0) % H
    ct = tl.program_id(0) // H % TILES
    kt = tl.program_id(0) // (H * TILES) % (K // 64)
    merge = merges + (BEGIN + tl.program_id(0) // (H * TILES * (K // 64))) * 4
    n = tl.load(merge)
    left = tl.load(merge + 2)
    target = tl.load(merge + 3)
    nodes = h * 2 * NC.to(tl.int64)
    parent = nodes + tl.where(left == 1, target, NC + target)
    right = nodes + NC + n
    total = tl.load(node_total + right)
    left_scale = tl.load(node_scale + nodes + n)
    right_scale = tl.load(node_scale + right)
    scale = tl.maximum(left_scale, right_scale)
    if (ct == 0) & (kt == 0):
        tl.store(node_total + parent, tl.load(node_total + nodes + n) + total)
        tl.store(node_scale + parent, scale)
    rows = transitions + right * (K * K)
    acc = tl.zeros((64, BN), tl.float32)
    if ct < K // BN:
        other = transitions + (nodes + n) * (K * K)
        for m in tl.range(0, K // 64, num_stages=STAGES):
            a = tl.load(rows + tile_at(kt * 64, m * 64, 64, 64, K))
            b = tl.load(other + tile_at(m * 64, ct * BN, 64, BN, K))
            acc = tl.dot(a, b, acc, input_precision=IP)
        tl.store(
            transitions + parent * (K * K) + tile_at(kt * 64, ct * BN, 64, BN, K), acc.to(NODE)
        )
    else:
        other = states + (h * NC.to(tl.int64) + n) * (K * V)
        column = ct * BN - K
        for m in tl.range(0, K // 64, num_stages=STAGES):
            a = tl.load(rows + tile_at(kt * 64, m * 64, 64, 64, K))
            b = tl.load(other + tile_at(m * 64, column, 64, BN, V))
            acc = tl.dot(a, b, acc, input_precision=IP)
        tile = tile_at(kt * 64, column, 64, BN, V)
        own = tl.load(right_states + (h * NC.to(tl.int64) + n) * (K * V) + tile).to(tl.float32)
        value = acc * (tl.exp(total) * (left_scale / scale)) + own * (right_scale / scale)
        to = (h * NC.to(tl.int64) + target) * (K * V) + tile
        if left == 1:
            tl.store(states + to, value.to(NODE))
        else:
            tl.store(right_states + to, value.to(NODE))


@triton.jit(do_not_specialize=["NC", "H", "L", "NL"])
def pair_weights_kernel(g_, level_weights, chunks, node_total, read_weights, NC, H, L, NL):
    """read_weights [H, NL, slots]: lambda of chunk level j times the decay from the end of the
    node read to the slot, by segments: the nearer nodes, then the chunk's start."""
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    token, length, c, reads, _, _, _ = pair_chunk_row(chunks, n)
    NS = NC.to(tl.int64) * 64
    i = tl.arange(0, 64)
    ok = i < length
    at = (token + i) * H + h
    total, _, _, _, _ = gate_totals(tl.load(g_ + at, mask=ok, other=0.0))
    total = total.to(tl.float32)
    nearer = 0.0
    e = c
    for _ in range(reads):
        low = e & (-e)
        j = bit_length(low) - 1
        weight = tl.load(level_weights + at * L + 7 + j, mask=ok, other=0.0).to(tl.float32)
        weight = weight * tl.exp(tl.minimum(total + nearer, 0.0))
        tl.store(read_weights + (h * NL + j) * NS + n * 64 + i, weight)
        nearer += tl.load(node_total + h * 2 * NC.to(tl.int64) + n - c + e)
        e = e - low


@triton.jit(do_not_specialize=["NC", "NR", "H", "G", "FAR"])
def pair_query_kernel(
    q_, k_, beta_, chunks, coefficients, carried, NC, NR, H, G, FAR,
    K: tl.constexpr, NODE: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of one chunk moved to its start, q - P diag(beta) k: its first row."""
    h = tl.program_id(0) % H
    kt = tl.program_id(0) // H % (K // 64)
    n = tl.program_id(0) // (H * (K // 64))
    group = h // (H // G)
    token, length, _, reads, _, _, row = pair_chunk_row(chunks, n)
    if reads + FAR > 0:
        i = tl.arange(0, 64)
        ok = i < length
        beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
        square = (h * NC.to(tl.int64) + n) * 4096 + tile_at(0, 0, 64, 64, 64)
        k = load_tokens(k_, token, ok, group, G, kt, K, 64).to(tl.float32)
        q = load_tokens(q_, token, ok, group, G, kt, K, 64).to(tl.float32)
        k_beta = (k * beta[:, None]).to(NODE)
        q -= tl.dot(tl.load(coefficients + square), k_beta, input_precision=IP)
        to = carried + (h * NR.to(tl.int64) + row) * (64 * K)
        tl.store(to + tile_at(0, kt * 64, 64, 64, K), q.to(NODE))


@triton.jit(do_not_specialize=["NC", "NR", "H", "BEGIN"])
def pair_carry_kernel(
    reads, transitions, carried, NC, NR, H, BEGIN,
    K: tl.constexpr, BN: tl.constexpr, NODE: tl.constexpr, IP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of one chunk past one node: the next row of `carried`."""
    h = tl.program_id(0) % H
    ct = tl.program_id(0) // H % (K // BN)
    read = reads + (BEGIN + tl.program_id(0) // (H * (K // BN))) * 4
    node = tl.load(read + 1)
    row = tl.load(read + 2)
    follows = tl.load(read + 3)
    if follows == 1:
        queries = carried + (h * NR.to(tl.int64) + row) * (64 * K)
        transition = transitions + (h * 2 * NC.to(tl.int64) + node) * (K * K)
        acc = tl.zeros((64, BN), tl.float32)
        for m in tl.range(0, K // 64, num_stages=STAGES):
            a = tl.load(queries + tile_at(0, m * 64, 64, 64, K))
            b = tl.load(transition + tile_at(m * 64, ct * BN, 64, BN, K))
            acc = tl.dot(a, b, acc, input_precision=IP)
        tl.store(queries + 64 * K + tile_at(0, ct * BN, 64, BN, K), acc.to(NODE))
