"""The last part of the backward pass: gradients of level weights and gates, by chunk."""

import triton
import triton.language as tl

from kernels.log_linear_ssd.triton_tiles import chunk_row, running_totals
from kernels.triton_levels import bit_length, decay_over


@triton.jit(do_not_specialize=["NC", "H", "L", "NL"])
def gates_kernel(
    g_, chunks, read_weights, dread_weights, dcompact, dg_inside, dg_across, leaving,
    merged, read_mass, dlevel_weights, dg, NC, H, L, NL,
    C: tl.constexpr, LP: tl.constexpr, TILES: tl.constexpr, TILES_PADDED: tl.constexpr,
):  # fmt: skip
    """dlevel_weights and dg of one chunk and head."""
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    token, length, c, reads = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    i = tl.arange(0, C)
    ok = i < length
    at = (token + i) * H + h
    slot = h * NS + n * C + i
    g = tl.load(g_ + at, mask=ok, other=0.0)
    total, far_total, near_total, _, middle, _ = running_totals(g, C)
    r = (i & 63)[:, None]
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
    out = tl.zeros((C, LP), tl.float32)
    for level in tl.static_range(7):
        if level < 4:
            here = tl.sum(tl.where(near_level == level, near, 0.0), 1)
        else:
            here = tl.sum(tl.where(far_level == level, far, 0.0), 1)
        out = tl.where(levels == level, here[:, None], out)
    upper = ok & (i >= 64)
    weights_at = h * NL * NS + n * C + i
    dweight = tl.load(dread_weights + weights_at, mask=upper, other=0.0)
    out = tl.where(levels == 7, (dweight * decay_over(total - middle))[:, None], out)
    decay = decay_over(total)
    entering = tl.zeros((C,), tl.float32)
    # Mass of the pairs that begin before the chunk and end after it, summed at the end.
    # In wide steps: at T = 131072 a node has up to 2048 masses, and each step waits for memory.
    passing = tl.zeros((1024,), tl.float32)
    tile = tl.arange(0, TILES_PADDED)
    carried = tl.zeros((TILES_PADDED,), tl.float32)
    last = tl.load(chunks + n * 6 + 5)
    x1024 = tl.arange(0, 1024)
    for j in range(NL - 1):
        if (((c >> j) & 1) == 1) & (reads > 0):  # the nearest nodes are read first
            reads -= 1
            row = weights_at + (1 + j) * NS
            dweight = tl.load(dread_weights + row, mask=ok, other=0.0)
            entering += dweight * tl.load(read_weights + row, mask=ok, other=0.0)
            out = tl.where(levels == 8 + j, (dweight * decay)[:, None], out)
            # Later readers of the same node, and those of what it is merged into.
            e = (c >> j) << j
            stop = 2 * tl.minimum(e + (1 << j), last + 1)
            masses = read_mass + ((h * NL + j) * NC.to(tl.int64) + n - c) * 2
            for y in range(2 * c + 2, stop, 1024):
                passing += tl.load(masses + y + x1024, mask=y + x1024 < stop, other=0.0)
            merge = (h * NC.to(tl.int64) + n - c + e) * TILES + tile
            read_later = e + (1 << j) <= last
            carried += tl.load(merged + merge, mask=(tile < TILES) & read_later, other=0.0)
    to = dlevel_weights + at[:, None] * L + levels
    tl.store(to, out.to(dlevel_weights.dtype.element_ty), mask=ok[:, None] & (levels < L))

    # A pair counts at every token after its key up to its query.
    mass = tl.load(dg_inside + slot, mask=ok, other=0.0) + entering
    mass += tl.load(dg_across + slot, mask=ok, other=0.0)
    sent = tl.load(leaving + slot, mask=ok, other=0.0)
    from_here = tl.sum(mass, 0) - tl.cumsum(mass, 0) + mass
    passed = tl.sum(passing, 0) + tl.sum(carried, 0)
    tl.store(dg + at, from_here + tl.cumsum(sent, 0) - sent + passed, mask=ok)
