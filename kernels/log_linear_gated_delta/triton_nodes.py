"""The part of the backward pass that goes through the tree: walk, sum, split, left, right.

With q_i the query that reads the i-th nearest node (M_i, U_i) with weight w_i, and d_i the gradient
of q_i, a chunk walks from its farthest node to its nearest:

    d_(i-1) = w_i do U_i^T + d_i M_i^T
    node i gets q_(i-1)^T d_i for its transition and q_(i-1)^T (w_i do) for its state

Then gradients go down the tree, from a parent (M, U) to its children:

    dM_l += M_r^T dM                 dU_l += exp(total_r) M_r^T dU
    dM_r  = dM M_l^T + exp(total_r) dU U_l^T          dU_r = dU

so that dU is the same for all nodes that end at one chunk: it is kept by that chunk alone. Every
tile of 64 by 64 of a node's gradient has a scale of its own (triton_tiles.py).
"""

import triton
import triton.language as tl

from kernels.log_linear_gated_delta.triton_tiles import (
    load_raw,
    load_scaled,
    load_tokens,
    pair_chunk_row,
    store_scaled,
    tile_at,
)


@triton.jit(do_not_specialize=["NC", "NR", "H", "NL", "BEGIN", "LEVEL"])
def pair_walk_kernel(
    do_, chunks, reads, transitions, states, node_scale, read_weights, carried, dcarried, dqueries,
    dread_weights, read_mass, NC, NR, H, NL, BEGIN, LEVEL,
    K: tl.constexpr, V: tl.constexpr, GRAD: tl.constexpr, IP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One read: d of its query, in dqueries [H, chunks, 64, K] where it is the chunk's first and
    else in its row; gradient of its weights, and their mass (sum of weight * dweight)
    [H, NL, chunks]."""
    h = tl.program_id(0) % H
    read = reads + (BEGIN + tl.program_id(0) // H) * 4
    n = tl.load(read)
    node = tl.load(read + 1)
    row = tl.load(read + 2)
    follows = tl.load(read + 3)
    token, length, _, _, _, _, first_row = pair_chunk_row(chunks, n)
    NS = NC.to(tl.int64) * 64
    i = tl.arange(0, 64)
    ok = i < length
    scale = tl.load(node_scale + h * 2 * NC.to(tl.int64) + node)
    weights_at = (h * NL + LEVEL) * NS + n * 64 + i
    weight = tl.load(read_weights + weights_at)
    transition = transitions + (h * 2 * NC.to(tl.int64) + node) * (K * K)
    state = states + (h * NC.to(tl.int64) + node) * (K * V)
    at = (h * NR.to(tl.int64) + row) * (64 * K)
    to = dcarried + at
    if row == first_row:
        to = dqueries + (h * NC.to(tl.int64) + n) * (64 * K)
    dweight = tl.zeros((64,), tl.float32)
    for kt in range(K // 64):
        seen = tl.zeros((64, 64), tl.float32)
        for vt in tl.range(0, V // 64, num_stages=STAGES):
            do = load_tokens(do_, token, ok, h, H, vt, V, 64).to(GRAD)
            u = tl.load(state + tile_at(kt * 64, vt * 64, 64, 64, V)).to(GRAD)
            seen = tl.dot(do, tl.trans(u), seen, input_precision=IP)
        q = tl.load(carried + at + tile_at(0, kt * 64, 64, 64, K)).to(tl.float32)
        dweight += tl.sum(seen * q, 1)
        d = seen * (weight * scale)[:, None]
        if follows == 1:
            for m in tl.range(0, K // 64, num_stages=STAGES):
                farther = tl.load(dcarried + at + 64 * K + tile_at(0, m * 64, 64, 64, K))
                t = tl.load(transition + tile_at(kt * 64, m * 64, 64, 64, K)).to(GRAD)
                d = tl.dot(farther, tl.trans(t), d, input_precision=IP)
        tl.store(to + tile_at(0, kt * 64, 64, 64, K), d.to(GRAD))
    dweight = dweight * scale
    tl.store(dread_weights + weights_at, dweight)
    tl.store(read_mass + (h * NL + LEVEL) * NC.to(tl.int64) + n, tl.sum(dweight * weight, 0))


@triton.jit(do_not_specialize=["NC", "NR", "NP", "H", "NL"])
def pair_sum_kernel(
    do_, chunks, reads, sums, read_weights, carried, dcarried, dtransitions, dtransition_scales,
    dstates, dstate_scales, partials, NC, NR, NP, H, NL,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, GRAD: tl.constexpr, IP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of a node's own gradient, summed over an item's readers: q^T d, q^T (weight do)."""
    TILES: tl.constexpr = (K + V) // BN
    h = tl.program_id(0) % H
    ct = tl.program_id(0) // H % TILES
    kt = tl.program_id(0) // (H * TILES) % (K // 64)
    item = sums + tl.program_id(0) // (H * TILES * (K // 64)) * 4
    node = tl.load(item)
    begin = tl.load(item + 1)
    count = tl.load(item + 2)
    target = tl.load(item + 3)
    follows = tl.load(reads + begin * 4 + 3)
    NS = NC.to(tl.int64) * 64
    i = tl.arange(0, 64)
    rows = h * NR.to(tl.int64)
    acc = tl.zeros((64, BN), tl.float32)
    if ct < K // BN:
        for x in tl.range(0, count * follows, num_stages=STAGES):
            at = (rows + tl.load(reads + (begin + x) * 4 + 2)) * (64 * K)
            q = tl.load(carried + at + tile_at(0, kt * 64, 64, 64, K)).to(GRAD)
            d = tl.load(dcarried + at + 64 * K + tile_at(0, ct * BN, 64, BN, K))
            acc = tl.dot(tl.trans(q), d, acc, input_precision=IP)
    else:
        _, _, c, _, _, _, _ = pair_chunk_row(chunks, node)
        level = _lowest_bit(c)
        for x in tl.range(0, count, num_stages=STAGES):
            n = tl.load(reads + (begin + x) * 4)
            at = (rows + tl.load(reads + (begin + x) * 4 + 2)) * (64 * K)
            token, length, _, _, _, _, _ = pair_chunk_row(chunks, n)
            q = tl.load(carried + at + tile_at(0, kt * 64, 64, 64, K)).to(GRAD)
            do = load_tokens(do_, token, i < length, h, H, ct - K // BN, V, BN).to(tl.float32)
            weight = tl.load(read_weights + (h * NL + level) * NS + n * 64 + i)
            weighed = (do * weight[:, None]).to(GRAD)
            acc = tl.dot(tl.trans(q), weighed, acc, input_precision=IP)
    if target >= 0:
        partial = partials + (h * NP.to(tl.int64) + target) * (K * (K + V))
        tl.store(partial + tile_at(kt * 64, ct * BN, 64, BN, K + V), acc)
    else:
        matrix = h * NC.to(tl.int64) + node
        if ct < K // BN:
            store_scaled(dtransitions, dtransition_scales, matrix, kt, ct, acc, K, K, BN)
        else:
            store_scaled(dstates, dstate_scales, matrix, kt, ct - K // BN, acc, K, V, BN)


@triton.jit
def _lowest_bit(c):
    """Index of the lowest set bit of a positive int32 below 2**24."""
    low = c & (-c)
    return (low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit(do_not_specialize=["NC", "NP", "H"])
def pair_split_kernel(
    splits, partials, dtransitions, dtransition_scales, dstates, dstate_scales, NC, NP, H,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Sums a node's partial gradients, always in the same order."""
    TILES: tl.constexpr = (K + V) // 64
    h = tl.program_id(0) % H
    ct = tl.program_id(0) // H % TILES
    kt = tl.program_id(0) // (H * TILES) % (K // 64)
    split = splits + tl.program_id(0) // (H * TILES * (K // 64)) * 3
    node = tl.load(split)
    first = tl.load(split + 1)
    acc = tl.zeros((64, 64), tl.float32)
    for x in range(tl.load(split + 2)):
        part = partials + (h * NP.to(tl.int64) + first + x) * (K * (K + V))
        acc += tl.load(part + tile_at(kt * 64, ct * 64, 64, 64, K + V))
    matrix = h * NC.to(tl.int64) + node
    if ct < K // 64:
        store_scaled(dtransitions, dtransition_scales, matrix, kt, ct, acc, K, K, 64)
    else:
        store_scaled(dstates, dstate_scales, matrix, kt, ct - K // 64, acc, K, V, 64)


@triton.jit(do_not_specialize=["NC", "H", "BEGIN"])
def pair_left_kernel(
    merges, transitions, states, node_total, node_scale, dtransitions, dtransition_scales,
    right_dtransitions, right_scales, dstates, dstate_scales, merged, NC, H, BEGIN,
    K: tl.constexpr, V: tl.constexpr, FINE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds to a tile of the left child's gradient what comes through the merge: M_r^T (dM, dU).

    merged [H, chunks, tiles of U]: the mass that the merge carries over the right child,
    <exp(total_r) M_r^T dU, U_l>, for the gradient of its gates.
    """
    TILES: tl.constexpr = (K + V) // 64
    h = tl.program_id(0) % H
    ct = tl.program_id(0) // H % TILES
    kt = tl.program_id(0) // (H * TILES) % (K // 64)
    merge = merges + (BEGIN + tl.program_id(0) // (H * TILES * (K // 64))) * 4
    n = tl.load(merge)
    end = tl.load(merge + 1)
    left = tl.load(merge + 2)
    target = tl.load(merge + 3)
    chunk = h * NC.to(tl.int64)
    right = transitions + (h * 2 * NC.to(tl.int64) + NC + n) * (K * K)
    acc = tl.zeros((64, 64), tl.float32)
    if ct < K // 64:
        parent = dtransitions
        scales = dtransition_scales
        if left == 0:
            parent = right_dtransitions
            scales = right_scales
        for m in tl.range(0, K // 64, num_stages=STAGES):
            a = tl.load(right + tile_at(m * 64, kt * 64, 64, 64, K))
            b, size = load_raw(parent, scales, chunk + target, m, ct, K, K)
            acc += tl.dot(tl.trans(a), b, input_precision=FINE) * size
        acc += load_scaled(dtransitions, dtransition_scales, chunk + n, kt, ct, K, K)
        tl.debug_barrier()  # the tile's old scale has been read by every thread
        store_scaled(dtransitions, dtransition_scales, chunk + n, kt, ct, acc, K, K, 64)
    else:
        vt = ct - K // 64
        for m in tl.range(0, K // 64, num_stages=STAGES):
            a = tl.load(right + tile_at(m * 64, kt * 64, 64, 64, K))
            b, size = load_raw(dstates, dstate_scales, chunk + end, m, vt, K, V)
            acc += tl.dot(tl.trans(a), b, input_precision=FINE) * size
        acc = acc * tl.exp(tl.load(node_total + h * 2 * NC.to(tl.int64) + NC + n))
        tile = (chunk + n) * (K * V) + tile_at(kt * 64, vt * 64, 64, 64, V)
        scale = tl.load(node_scale + h * 2 * NC.to(tl.int64) + n)
        mass = tl.sum(tl.sum(acc * tl.load(states + tile).to(tl.float32), 1), 0) * scale
        tiles: tl.constexpr = (K // 64) * (V // 64)
        tl.store(merged + (chunk + n) * tiles + kt * (V // 64) + vt, mass)
        acc += load_scaled(dstates, dstate_scales, chunk + n, kt, vt, K, V)
        tl.debug_barrier()
        store_scaled(dstates, dstate_scales, chunk + n, kt, vt, acc, K, V, 64)


@triton.jit(do_not_specialize=["NC", "H", "BEGIN"])
def pair_right_kernel(
    merges, transitions, states, node_total, node_scale, dtransitions, dtransition_scales,
    right_dtransitions, right_scales, dstates, dstate_scales, NC, H, BEGIN,
    K: tl.constexpr, V: tl.constexpr, FINE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the right child's transition: dM M_l^T + exp(total_r) dU U_l^T."""
    h = tl.program_id(0) % H
    ct = tl.program_id(0) // H % (K // 64)
    kt = tl.program_id(0) // (H * (K // 64)) % (K // 64)
    merge = merges + (BEGIN + tl.program_id(0) // (H * (K // 64) * (K // 64))) * 4
    n = tl.load(merge)
    end = tl.load(merge + 1)
    left = tl.load(merge + 2)
    target = tl.load(merge + 3)
    chunk = h * NC.to(tl.int64)
    acc = tl.zeros((64, 64), tl.float32)
    state = states + (chunk + n) * (K * V)
    for m in tl.range(0, V // 64, num_stages=STAGES):
        a, size = load_raw(dstates, dstate_scales, chunk + end, kt, m, K, V)
        b = tl.load(state + tile_at(ct * 64, m * 64, 64, 64, V))
        acc += tl.dot(a, tl.trans(b), input_precision=FINE) * size
    nodes = h * 2 * NC.to(tl.int64)
    acc = acc * (tl.exp(tl.load(node_total + nodes + NC + n)) * tl.load(node_scale + nodes + n))
    parent = dtransitions
    scales = dtransition_scales
    if left == 0:
        parent = right_dtransitions
        scales = right_scales
    transition = transitions + (nodes + n) * (K * K)
    for m in tl.range(0, K // 64, num_stages=STAGES):
        a, size = load_raw(parent, scales, chunk + target, kt, m, K, K)
        b = tl.load(transition + tile_at(ct * 64, m * 64, 64, 64, K))
        acc += tl.dot(a, tl.trans(b), input_precision=FINE) * size
    store_scaled(right_dtransitions, right_scales, chunk + n, kt, ct, acc, K, K, 64)
