"""The gated delta rule inside a chunk, in Triton: gates, the WY form, the chunk's tree node.

    A = tril(diag(beta) k k^T, -1)      R = (I + A)^-1       P = tril(q k^T) R
    carried keys     k^T R              k of every slot, moved to the chunk's end
    carried queries  q - P diag(beta) k q of every slot, moved to the chunk's start (triton_tree)
    transition       I - (k^T R) diag(beta) k
    state            (k^T R) diag(beta, decay to the chunk's end) v

Decay is kept out of R, P and the transition: it is a scalar, and lies in the weights of reads.
"""

import triton
import triton.language as tl

from kernels.log_linear_gated_delta.triton_tiles import (
    dot_fine,
    gate_totals,
    load_tokens,
    pair_chunk_row,
    tile_at,
    unit_lower_inverse,
)
from kernels.triton_levels import bit_length, decay_over


@triton.jit(do_not_specialize=["NC", "H", "L"])
def pair_prepare_kernel(
    g_, v_, level_weights, chunks, compact, block_end, chunk_end, chunk_total, value_scale,
    NC, H, L,
    V: tl.constexpr,
):  # fmt: skip
    """Gates of a chunk, and a power of two that no |v| of it exceeds."""
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    token, length, _, _, _, _, _ = pair_chunk_row(chunks, n)
    NS = NC.to(tl.int64) * 64
    i = tl.arange(0, 64)
    ok = i < length
    at = (token + i) * H + h
    slot = h * NS + n * 64 + i
    g = tl.load(g_ + at, mask=ok, other=0.0)
    total, far_total, near_total, own_end, end = gate_totals(g)
    r = i[:, None]
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
    tl.store(block_end + slot, decay_over(own_end - total))
    tl.store(chunk_end + slot, decay_over(end - total))
    tl.store(chunk_total + h * NC.to(tl.int64) + n, end.to(tl.float32))
    largest = tl.zeros((64,), tl.float32)
    for vt in tl.static_range(V // 64):
        v = load_tokens(v_, token, ok, h, H, vt, V, 64).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(v), 1))
    exponent = tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23
    scale = tl.minimum(tl.maximum(exponent + 1, 1), 253) << 23
    tl.store(value_scale + h * NC.to(tl.int64) + n, scale.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["NC", "H", "G"])
def pair_chunk_kernel(
    q_, k_, beta_, chunks, inverse, coefficients, keys, NC, H, G,
    K: tl.constexpr, NODE: tl.constexpr, GRAD: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """R, P [H, chunks, 64, 64] and k^T R [H, chunks, K, 64]."""
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    group = h // (H // G)
    token, length, _, _, _, _, _ = pair_chunk_row(chunks, n)
    i = tl.arange(0, 64)
    ok = i < length
    beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
    scores = tl.zeros((64, 64), tl.float32)
    overlap = tl.zeros((64, 64), tl.float32)
    for kt in range(K // 64):
        k = load_tokens(k_, token, ok, group, G, kt, K, 64).to(GRAD)
        q = load_tokens(q_, token, ok, group, G, kt, K, 64).to(GRAD)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=IP)
        overlap = tl.dot(k, tl.trans(k), overlap, input_precision=IP)
    inv = unit_lower_inverse(tl.where(i[:, None] > i[None, :], overlap * beta[:, None], 0.0))
    scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
    square = (h * NC.to(tl.int64) + n) * 4096 + tile_at(0, 0, 64, 64, 64)
    tl.store(coefficients + square, tl.dot(scores, inv, input_precision="tf32x3").to(NODE))
    tl.store(inverse + square, inv)
    for kt in range(K // 64):
        k = load_tokens(k_, token, ok, group, G, kt, K, 64)
        moved = dot_fine(tl.trans(k.to(NODE)), inv, NODE, IP)
        to = keys + (h * NC.to(tl.int64) + n) * (K * 64) + tile_at(kt * 64, 0, 64, 64, 64)
        tl.store(to, moved.to(NODE))


@triton.jit(do_not_specialize=["NC", "H", "G"])
def pair_leaf_kernel(
    k_, v_, beta_, chunks, keys, chunk_end, chunk_total, value_scale, transitions, states,
    right_states, node_total, node_scale, NC, H, G,
    K: tl.constexpr, V: tl.constexpr, NODE: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """64 rows of the node of one chunk: the left child of its merge or the right one."""
    h = tl.program_id(0) % H
    kt = tl.program_id(0) // H % (K // 64)
    n = tl.program_id(0) // (H * (K // 64))
    group = h // (H // G)
    token, length, c, _, first, last, _ = pair_chunk_row(chunks, n)
    if c < last:
        left = ((c & 1) == 0) | (c == first)
        i = tl.arange(0, 64)
        ok = i < length
        chunk = h * NC.to(tl.int64) + n
        beta = tl.load(beta_ + (token + i) * H + h, mask=ok, other=0.0).to(tl.float32)
        scale = tl.load(value_scale + chunk)
        inserted = beta * tl.load(chunk_end + chunk * 64 + i) / scale
        moved = tl.load(keys + chunk * (K * 64) + tile_at(kt * 64, 0, 64, 64, 64))
        node = h * 2 * NC.to(tl.int64) + tl.where(left, n + 1, NC + n)
        state = h * NC.to(tl.int64) + tl.where(left, n + 1, n)
        if kt == 0:
            tl.store(node_total + node, tl.load(chunk_total + chunk))
            tl.store(node_scale + node, scale)
        for ct in range(K // 64):
            k = load_tokens(k_, token, ok, group, G, ct, K, 64).to(tl.float32)
            erased = tl.dot(moved, (k * beta[:, None]).to(NODE), input_precision=IP)
            one = (kt == ct) & (i[:, None] == i[None, :])
            to = transitions + node * (K * K) + tile_at(kt * 64, ct * 64, 64, 64, K)
            tl.store(to, (one.to(tl.float32) - erased).to(NODE))
        for ct in range(V // 64):
            v = load_tokens(v_, token, ok, h, H, ct, V, 64).to(tl.float32)
            value = tl.dot(moved, (v * inserted[:, None]).to(NODE), input_precision=IP).to(NODE)
            at = state * (K * V) + tile_at(kt * 64, ct * 64, 64, 64, V)
            if left:
                tl.store(states + at, value)
            else:
                tl.store(right_states + at, value)
