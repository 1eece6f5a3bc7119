"""The last part of the backward pass: gradients of level weights, gates and beta, by chunk.

The gradient of g at a token is the sum of weight * gradient over all pairs (s, t) with s before
it and t not before it, as in log-linear SSD (kernels/log_linear_ssd/triton_backward.py): pairs
inside the chunk, pairs that enter or leave it, and pairs that pass over it, which are those that
a merge carries over its right child and those of later readers of a node. Transitions are free of
decay, so they add nothing.
"""

import triton
import triton.language as tl

from kernels.log_linear_gated_delta.triton_tiles import gate_totals, pair_chunk_row
from kernels.triton_levels import bit_length, decay_over


@triton.jit(do_not_specialize=["NC", "H", "L", "NL"])
def pair_gates_kernel(
    g_, chunks, node_total, read_weights, dread_weights, dcompact, dg_inside, leaving, merged,
    read_mass, dbeta_values, dbeta_keys, dlevel_weights, dg, dbeta, NC, H, L, NL,
    LP: tl.constexpr, TILES: tl.constexpr, TILES_PADDED: tl.constexpr, VALUE_TILES: tl.constexpr,
    KEY_TILES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    token, length, c, reads, _, last, _ = pair_chunk_row(chunks, n)
    NS = NC.to(tl.int64) * 64
    i = tl.arange(0, 64)
    ok = i < length
    at = (token + i) * H + h
    slot = h * NS + n * 64 + i
    g = tl.load(g_ + at, mask=ok, other=0.0)
    total, far_total, near_total, _, _ = gate_totals(g)
    r = i[:, None]
    k = tl.arange(0, 8)[None, :]
    levels = tl.arange(0, LP)[None, :]
    from_compact = dcompact + slot[:, None] * 16 + k
    seen = ok[:, None] & (k < (r >> 3))
    far = tl.load(from_compact, mask=seen, other=0.0) * decay_over(total[:, None] - far_total)
    far_level = bit_length(r ^ (8 * k + 7))
    seen = ok[:, None] & (k <= (r & 7))
    near = tl.load(from_compact + 8, mask=seen, other=0.0)
    near = near * decay_over(total[:, None] - near_total)
    near_level = bit_length((r & 7) ^ k)
    out = tl.zeros((64, LP), tl.float32)
    for level in tl.static_range(7):
        if level < 4:
            here = tl.sum(tl.where(near_level == level, near, 0.0), 1)
        else:
            here = tl.sum(tl.where(far_level == level, far, 0.0), 1)
        out = tl.where(levels == level, here[:, None], out)
    entering = tl.zeros((64,), tl.float32)
    # Mass of the pairs that begin before the chunk and end after it, summed at the end.
    passing = tl.zeros((512,), tl.float32)
    tile = tl.arange(0, TILES_PADDED)
    carried = tl.zeros((TILES_PADDED,), tl.float32)
    x512 = tl.arange(0, 512)
    total = total.to(tl.float32)
    nearer = 0.0
    e = c
    for _ in range(reads):
        low = e & (-e)
        j = bit_length(low) - 1
        row = (h * NL + j) * NS + n * 64 + i
        dweight = tl.load(dread_weights + row, mask=ok, other=0.0)
        entering += dweight * tl.load(read_weights + row, mask=ok, other=0.0)
        decay = tl.exp(tl.minimum(total + nearer, 0.0))
        out = tl.where(levels == 7 + j, (dweight * decay)[:, None], out)
        # Later readers of the same node, and those of what it is merged into.
        stop = tl.minimum(e + low, last + 1)
        masses = read_mass + (h * NL + j) * NC.to(tl.int64) + n - c
        for y in range(c + 1, stop, 512):
            passing += tl.load(masses + y + x512, mask=y + x512 < stop, other=0.0)
        merge = (h * NC.to(tl.int64) + n - c + e) * TILES + tile
        merges = (tile < TILES) & (e + low <= last)
        carried += tl.load(merged + merge, mask=merges, other=0.0)
        nearer += tl.load(node_total + h * 2 * NC.to(tl.int64) + n - c + e)
        e = e - low
    to = dlevel_weights + at[:, None] * L + levels
    tl.store(to, out.to(dlevel_weights.dtype.element_ty), mask=ok[:, None] & (levels < L))

    # A pair counts at every token after its key up to its query.
    mass = tl.load(dg_inside + slot, mask=ok, other=0.0) + entering
    sent = tl.zeros((64,), tl.float32)
    db = tl.zeros((64,), tl.float32)
    for t in tl.static_range(VALUE_TILES):
        here = (h * VALUE_TILES + t) * NS + n * 64 + i
        sent += tl.load(leaving + here, mask=ok, other=0.0)
        db += tl.load(dbeta_values + here, mask=ok, other=0.0)
    for t in tl.static_range(KEY_TILES):
        db += tl.load(dbeta_keys + (h * KEY_TILES + t) * NS + n * 64 + i, mask=ok, other=0.0)
    tl.store(dbeta + at, db, mask=ok)
    from_here = tl.sum(mass, 0) - tl.cumsum(mass, 0) + mass
    passed = tl.sum(passing, 0) + tl.sum(carried, 0)
    tl.store(dg + at, from_here + tl.cumsum(sent, 0) - sent + passed, mask=ok)
