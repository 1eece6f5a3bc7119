"""The part of the backward pass inside chunks: through the tree node, the WY form and the scores.

With dq0 the gradient of the carried queries, (dM, dU) that of the chunk's node, W the weights of
pairs (lambda times decay), Y = R^T k, e the decay to the chunk's end, and rows scaled by beta
where a name ends in b:

    dY  = (e vb) dU^T - kb dM^T              Z   = R dY
    dvb = (P W)^T do + e Y dU                dP  = (do vb^T) W - dq0 kb^T
    dS  = tril(dP R^T)                       dA  = -tril(P^T (dP R^T) + Y Z^T, -1)
    dkb = dA k - P^T dq0 - Y dM              dk  = Z + dA^T kb + dS^T q + beta dkb
    dq  = dq0 + dS k                         dbeta = rowsum(dkb k) + rowsum(dvb v)

[C, C] matrices stay in fp32, and dP R^T keeps all its digits: with repeated keys the sums of their
rows cancel.
"""

import triton
import triton.language as tl

from kernels.log_linear_gated_delta.triton_tiles import (
    by_rows,
    load_raw,
    load_scaled,
    load_tokens,
    pair_chunk_row,
    pair_weights,
    pair_weights_transposed,
    store_scaled,
    tile_at,
)
from kernels.triton_levels import same_block, selectors_transposed


@triton.jit(do_not_specialize=["NC", "H", "G"])
def pair_state_kernel(
    k_, v_, beta_, chunks, chunk_end, dtransitions, dtransition_scales, right_dtransitions,
    right_scales, dstates, dstate_scales, dkeys, dkey_scales, NC, H, G,
    K: tl.constexpr, V: tl.constexpr, NODE: tl.constexpr, FINE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dY [H, chunks, 64, K], a tile of 64 columns."""
    h = tl.program_id(0) % H
    kt = tl.program_id(0) // H % (K // 64)
    n = tl.program_id(0) // (H * (K // 64))
    group = h // (H // G)
    token, length, c, _, first, last, _ = pair_chunk_row(chunks, n)
    i = tl.arange(0, 64)
    ok = i < length
    chunk = h * NC.to(tl.int64) + n
    beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
    inserted = beta * tl.load(chunk_end + chunk * 64 + i)
    acc = tl.zeros((64, 64), tl.float32)
    if c < last:
        for m in tl.range(0, V // 64, num_stages=STAGES):
            v, rows = by_rows(load_tokens(v_, token, ok, h, H, m, V, 64).to(tl.float32), NODE)
            d, size = load_raw(dstates, dstate_scales, chunk + 1, kt, m, K, V)
            rows = rows * inserted * size
            acc += tl.dot(v, tl.trans(d), input_precision=FINE) * rows[:, None]
        transition = dtransitions
        scales = dtransition_scales
        right = ((c & 1) == 1) & (c > first)
        if right:
            transition = right_dtransitions
            scales = right_scales
        matrix = tl.where(right, chunk, chunk + 1)
        for m in tl.range(0, K // 64, num_stages=STAGES):
            k, rows = by_rows(load_tokens(k_, token, ok, group, G, m, K, 64).to(tl.float32), NODE)
            d, size = load_raw(transition, scales, matrix, kt, m, K, K)
            rows = rows * beta * size
            acc -= tl.dot(k, tl.trans(d), input_precision=FINE) * rows[:, None]
    store_scaled(dkeys, dkey_scales, chunk, 0, kt, acc, 64, K, 64)


@triton.jit(do_not_specialize=["NC", "H", "G", "FAR"])
def pair_inside_kernel(
    k_, v_, beta_, do_, chunks, compact, block_end, inverse, coefficients, keys, dkeys, dkey_scales,
    dqueries, dcompact, dg_inside, dscores, doverlap, NC, H, G, FAR,
    K: tl.constexpr, V: tl.constexpr, GRAD: tl.constexpr, IP: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dS, dA [H, chunks, 64, 64] fp32; gradients of the compact weights without their lambda, and
    of the gates through pairs inside the chunk."""
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    group = h // (H // G)
    token, length, _, reads, _, _, _ = pair_chunk_row(chunks, n)
    i = tl.arange(0, 64)
    ok = i < length
    chunk = h * NC.to(tl.int64) + n
    own = chunk * 64 + i
    square = chunk * 4096 + tile_at(0, 0, 64, 64, 64)
    beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
    dweighted = tl.zeros((64, 64), tl.float32)
    for vt in range(V // 64):
        do = load_tokens(do_, token, ok, h, H, vt, V, 64).to(GRAD)
        v = load_tokens(v_, token, ok, h, H, vt, V, 64).to(GRAD)
        dweighted = tl.dot(do, tl.trans(v), dweighted, input_precision=IP)
    dweighted = dweighted * beta[None, :]
    weights = pair_weights(compact, block_end, own)
    dweights = dweighted * tl.load(coefficients + square).to(tl.float32)
    masses = tl.where(i[:, None] == i[None, :], 0.0, dweights * weights)
    tl.store(dg_inside + own, tl.sum(masses, 1) - tl.sum(masses, 0))
    far_sum, near_sum = selectors_transposed(tl.float32)
    in_block = same_block()
    end = tl.load(block_end + own)
    da = tl.dot(dweights * end[None, :], far_sum, input_precision=FINE)
    da = tl.dot(tl.where(in_block, dweights, 0.0), near_sum, da, input_precision=FINE)
    tl.store(dcompact + own[:, None] * 16 + tl.arange(0, 16)[None, :], da)

    erased = tl.zeros((64, 64), tl.float32)
    if reads + FAR > 0:
        for kt in range(K // 64):
            d = tl.load(dqueries + chunk * (64 * K) + tile_at(0, kt * 64, 64, 64, K))
            k = load_tokens(k_, token, ok, group, G, kt, K, 64).to(GRAD)
            erased = tl.dot(d, tl.trans(k), erased, input_precision=IP)
    seen = i[:, None] >= i[None, :]
    dp = tl.where(seen, dweighted * weights - erased * beta[None, :], 0.0)
    r_transposed = tl.trans(tl.load(inverse + square))
    ds = tl.dot(dp, r_transposed, input_precision="tf32x3")
    tl.store(dscores + square, tl.where(seen, ds, 0.0))
    p_transposed = tl.trans(tl.load(coefficients + square)).to(tl.float32)
    overlap = tl.dot(p_transposed, ds, input_precision=FINE)
    for kt in range(K // 64):
        y = tl.trans(tl.load(keys + chunk * (K * 64) + tile_at(kt * 64, 0, 64, 64, 64)))
        dy = load_scaled(dkeys, dkey_scales, chunk, 0, kt, 64, K)
        z_transposed = tl.dot(tl.trans(dy), r_transposed, input_precision=FINE)
        overlap = tl.dot(y.to(tl.float32), z_transposed, overlap, input_precision=FINE)
    tl.store(doverlap + square, tl.where(i[:, None] > i[None, :], -overlap, 0.0))


@triton.jit(do_not_specialize=["NC", "H"])
def pair_values_kernel(
    v_, beta_, do_, chunks, compact, block_end, chunk_end, coefficients, keys, dstates,
    dstate_scales, dv_, leaving, dbeta_values, NC, H,
    K: tl.constexpr, V: tl.constexpr, GRAD: tl.constexpr, IP: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dv, 64 columns; leaving [H, tiles, slots]: mass of all pairs from the slot to later chunks;
    dbeta's part through the values [H, tiles, slots]."""
    h = tl.program_id(0) % H
    vt = tl.program_id(0) // H % (V // 64)
    n = tl.program_id(0) // (H * (V // 64))
    token, length, c, _, _, last, _ = pair_chunk_row(chunks, n)
    i = tl.arange(0, 64)
    ok = i < length
    chunk = h * NC.to(tl.int64) + n
    own = chunk * 64 + i
    part = ((h * (V // 64) + vt) * NC.to(tl.int64) + n) * 64 + i
    beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
    v = load_tokens(v_, token, ok, h, H, vt, V, 64).to(tl.float32)
    dvb = tl.zeros((64, 64), tl.float32)
    if c < last:
        for m in range(K // 64):
            y = tl.trans(tl.load(keys + chunk * (K * 64) + tile_at(m * 64, 0, 64, 64, 64)))
            d, size = load_raw(dstates, dstate_scales, chunk + 1, m, vt, K, V)
            dvb += tl.dot(y, d, input_precision=FINE) * size
        dvb = dvb * tl.load(chunk_end + own)[:, None]
    tl.store(leaving + part, tl.sum(dvb * v, 1) * beta)
    weights = pair_weights_transposed(compact, block_end, own)
    p = tl.trans(tl.load(coefficients + chunk * 4096 + tile_at(0, 0, 64, 64, 64)))
    do = load_tokens(do_, token, ok, h, H, vt, V, 64).to(GRAD)
    dvb = tl.dot((p.to(tl.float32) * weights).to(GRAD), do, dvb, input_precision=IP)
    tl.store(dbeta_values + part, tl.sum(dvb * v, 1))
    to = dv_ + ((token + i) * H + h)[:, None] * V + vt * 64 + tl.arange(0, 64)[None, :]
    tl.store(to, (dvb * beta[:, None]).to(dv_.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["NC", "H", "G", "FAR"])
def pair_keys_kernel(
    q_, k_, beta_, chunks, inverse, coefficients, keys, dkeys, dkey_scales, dqueries,
    dtransitions, dtransition_scales, right_dtransitions, right_scales, dscores, doverlap, dq_, dk_,
    dbeta_keys, NC, H, G, FAR,
    K: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dq, dk of one head [tokens, H, K], 64 columns; dbeta's part through the keys."""
    h = tl.program_id(0) % H
    kt = tl.program_id(0) // H % (K // 64)
    n = tl.program_id(0) // (H * (K // 64))
    group = h // (H // G)
    token, length, c, reads, first, last, _ = pair_chunk_row(chunks, n)
    i = tl.arange(0, 64)
    ok = i < length
    chunk = h * NC.to(tl.int64) + n
    square = chunk * 4096 + tile_at(0, 0, 64, 64, 64)
    beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
    q = load_tokens(q_, token, ok, group, G, kt, K, 64).to(tl.float32)
    k = load_tokens(k_, token, ok, group, G, kt, K, 64).to(tl.float32)
    ds = tl.load(dscores + square)
    da = tl.load(doverlap + square)
    dq = tl.dot(ds, k, input_precision=FINE)
    dkb = tl.dot(da, k, input_precision=FINE)
    if reads + FAR > 0:
        d = tl.load(dqueries + chunk * (64 * K) + tile_at(0, kt * 64, 64, 64, K)).to(tl.float32)
        dq += d
        p = tl.trans(tl.load(coefficients + square)).to(tl.float32)
        dkb = tl.dot(-p, d, dkb, input_precision=FINE)
    dk = tl.zeros((64, 64), tl.float32)
    if c < last:
        transition = dtransitions
        scales = dtransition_scales
        right = ((c & 1) == 1) & (c > first)
        if right:
            transition = right_dtransitions
            scales = right_scales
        matrix = tl.where(right, chunk, chunk + 1)
        for m in range(K // 64):
            y = tl.trans(tl.load(keys + chunk * (K * 64) + tile_at(m * 64, 0, 64, 64, 64)))
            d, size = load_raw(transition, scales, matrix, m, kt, K, K)
            dkb -= tl.dot(y, d, input_precision=FINE) * size
        r = tl.load(inverse + square)
        dy = load_scaled(dkeys, dkey_scales, chunk, 0, kt, 64, K)
        dk = tl.dot(r, dy, input_precision=FINE)
    dk = tl.dot(tl.trans(tl.load(doverlap + square)), k * beta[:, None], dk, input_precision=FINE)
    dk = tl.dot(tl.trans(tl.load(dscores + square)), q, dk, input_precision=FINE)
    dk += dkb * beta[:, None]
    part = ((h * (K // 64) + kt) * NC.to(tl.int64) + n) * 64 + i
    tl.store(dbeta_keys + part, tl.sum(dkb * k, 1))
    to = ((token + i) * H + h)[:, None] * K + kt * 64 + tl.arange(0, 64)[None, :]
    tl.store(dq_ + to, dq.to(dq_.dtype.element_ty), mask=ok[:, None])
    tl.store(dk_ + to, dk.to(dk_.dtype.element_ty), mask=ok[:, None])
