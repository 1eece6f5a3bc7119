"""What the gated delta rule's Triton kernels share: loads, decay inside a chunk, the WY inverse.

A chunk has 64 slots. The weight of a pair of slots, lambda times decay, is kept compact
(kernels/triton_levels.py).
"""

import triton
import triton.language as tl

from kernels.triton_levels import power_above, same_block, selectors, selectors_transposed


@triton.jit
def pair_chunk_row(chunks, n):
    """first token (int64), tokens, c, nodes to read, first, last, first row: plan.chunks[n]."""
    token = tl.load(chunks + n * 7).to(tl.int64)
    length = tl.load(chunks + n * 7 + 1)
    c = tl.load(chunks + n * 7 + 2)
    reads = tl.load(chunks + n * 7 + 3)
    first = tl.load(chunks + n * 7 + 4)
    last = tl.load(chunks + n * 7 + 5)
    row = tl.load(chunks + n * 7 + 6)
    return token, length, c, reads, first, last, row


@triton.jit
def load_tokens(X, token, ok, head, HEADS, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[64, BLOCK] of X [tokens, HEADS, WIDTH] from `token` on: columns tile BLOCK ... of `head`,
    zero where not ok."""
    rows = token + tl.arange(0, 64)
    at = (rows * HEADS + head)[:, None] * WIDTH + tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(X + at, mask=ok[:, None], other=0.0)


@triton.jit
def tile_at(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets [ROWS, COLUMNS] of a tile of a matrix of WIDTH columns, by its first entry."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    return rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def gate_totals(g):
    """Sums of g [64] in fp64: from the chunk's start to each slot, to the ends of its eight blocks
    of 8 [64, 8], to the eight slots of each slot's own block [64, 8], to the end of the own block,
    and to the chunk's end. fp64, since the weights are exp of differences."""
    i = tl.arange(0, 64)
    column = tl.arange(0, 8)
    total = tl.cumsum(g.to(tl.float64), 0)
    by_block = tl.reshape(total, (8, 8))
    ends = tl.sum(tl.where(column[None, :] == 7, by_block, 0.0), 1)
    far = tl.broadcast_to(ends[None, :], (64, 8))
    near = tl.reshape(tl.broadcast_to(by_block[:, None, :], (8, 8, 8)), (64, 8))
    own_end = tl.reshape(tl.broadcast_to(ends[:, None], (8, 8)), (64,))
    end = tl.sum(tl.where(i == 63, total, 0.0), 0)
    return total, far, near, own_end, end


@triton.jit
def pair_weights(compact, block_end, own):
    """[64, 64]: lambda times decay of every pair of slots, zero above the diagonal."""
    far, near = selectors(compact.dtype.element_ty)
    c16 = tl.arange(0, 16)
    a = tl.load(compact + own[:, None] * 16 + c16[None, :])
    end = tl.load(block_end + own)
    return tl.where(
        same_block(),
        tl.dot(a, near, input_precision="tf32x3"),
        tl.dot(a, far, input_precision="tf32x3") * end[None, :],
    )


@triton.jit
def pair_weights_transposed(compact, block_end, own):
    """`pair_weights` with rows and columns exchanged, built that way."""
    far, near = selectors_transposed(compact.dtype.element_ty)
    c16 = tl.arange(0, 16)
    a = tl.trans(tl.load(compact + own[:, None] * 16 + c16[None, :]))
    end = tl.load(block_end + own)
    return tl.where(
        same_block(),
        tl.dot(near, a, input_precision="tf32x3"),
        tl.dot(far, a, input_precision="tf32x3") * end[:, None],
    )


@triton.jit
def unit_lower_inverse(A):
    """(I + A)^-1 for A [64, 64] strictly lower triangular, exact to fp32.

    Blocks of 16 by substitution, row by row, all four at once; then pairs of blocks twice:
    [[P, 0], [X, Q]]^-1 = [[P^-1, 0], [-Q^-1 X P^-1, Q^-1]]. No powers of A, whose entries grow
    beyond any digits where keys repeat.
    """
    b = tl.arange(0, 4)
    i = tl.arange(0, 16)
    own = (b[:, None] == b[None, :])[:, None, :, None]
    x = -tl.sum(tl.where(own, tl.reshape(A, (4, 16, 4, 16)), 0.0), 2)
    for r in range(1, 16):
        here = (i == r)[None, :, None]
        row = tl.sum(tl.where(here, x, 0.0), 1)
        row += tl.sum(row[:, :, None] * x, 1)
        x = tl.where(here, row[:, None, :], x)
    x += (i[:, None] == i[None, :])[None, :, :].to(tl.float32)
    blocks = tl.where(own, tl.broadcast_to(x[:, :, None, :], (4, 16, 4, 16)), 0.0)
    inverse = tl.reshape(blocks, (64, 64))
    r = tl.arange(0, 64)
    for size in tl.static_range(16, 33, 16):
        cross = ((r // (2 * size))[:, None] == (r // (2 * size))[None, :]) & (
            (r // size)[:, None] > (r // size)[None, :]
        )
        x64 = tl.dot(inverse, tl.where(cross, A, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(x64, inverse, input_precision="tf32x3")
    return inverse


@triton.jit
def dot_fine(x, y, NODE: tl.constexpr, IP: tl.constexpr):
    """x y with y [64, N] in fp32 kept to 22 bits; x is exact in NODE."""
    if tl.float16 == NODE:
        high = y.to(tl.float16)
        low = (y - high.to(tl.float32)).to(tl.float16)
        product = tl.dot(x, low, tl.dot(x, high))
    else:
        product = tl.dot(x, y, input_precision=IP)
    return product


@triton.jit
def load_raw(X, scales, matrix, kt, ct, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile (kt, ct), 64 by 64, of matrix number `matrix` [ROWS, COLUMNS] as it lies in X, and the
    scale that belongs to it: for products, which are then of 16 bits (as exact as tf32, twice as
    fast) and scaled afterwards."""
    tile = (matrix * (ROWS // 64) + kt) * (COLUMNS // 64) + ct
    at = matrix * (ROWS * COLUMNS) + tile_at(kt * 64, ct * 64, 64, 64, COLUMNS)
    return tl.load(X + at), tl.load(scales + tile)


@triton.jit
def load_scaled(X, scales, matrix, kt, ct, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile itself, in fp32."""
    x, scale = load_raw(X, scales, matrix, kt, ct, ROWS, COLUMNS)
    return x.to(tl.float32) * scale


@triton.jit
def by_rows(x, NODE: tl.constexpr):
    """x [64, N] in NODE with a power of two [64] taken out of each row, so that fp16 holds a row of
    any size (all bits of a bf16 one)."""
    scale, one_over = power_above(tl.max(tl.abs(x), 1))
    return (x * one_over[:, None]).to(NODE), scale


@triton.jit
def store_scaled(X, scales, matrix, kt, ct, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 BN: tl.constexpr):  # fmt: skip
    """The inverse, of BN columns from column ct BN on: divided by a power of two above all |x|, so
    that fp16 holds a gradient of any size."""
    scale, one_over = power_above(tl.max(tl.max(tl.abs(x), 1), 0))
    at = matrix * (ROWS * COLUMNS) + tile_at(kt * 64, ct * BN, 64, BN, COLUMNS)
    tl.store(X + at, (x * one_over).to(X.dtype.element_ty))
    tile = (matrix * (ROWS // 64) + kt) * (COLUMNS // 64) + ct * (BN // 64)
    tl.store(scales + tile + tl.arange(0, BN // 64), scale + tl.zeros((BN // 64,), tl.float32))
