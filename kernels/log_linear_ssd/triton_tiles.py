"""What the Triton kernels of log-linear SSD share: loads, and sums of gates.

A chunk has 128 slots in two halves of 64; kernels/triton_levels.py says how the weights inside a
half are kept.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_row(chunks, n):
    """first token (int64), tokens, index in the document, nodes to read: plan.chunks[n]."""
    token = tl.load(chunks + n * 6).to(tl.int64)
    length = tl.load(chunks + n * 6 + 1)
    c = tl.load(chunks + n * 6 + 2)
    reads = tl.load(chunks + n * 6 + 3)
    return token, length, c, reads


@triton.jit
def running_totals(g, C: tl.constexpr):
    """Sums of g [C] in fp64: from the chunk's start to each slot, to the end of the half's eight
    blocks of 8 [C, 8], to the eight slots of each slot's own block [C, 8], to the end of the own
    block, to the chunk's middle and to its end. fp64, since the weights are exp of differences."""
    i = tl.arange(0, C)
    column = tl.arange(0, 8)
    total = tl.cumsum(g.to(tl.float64), 0)
    by_block = tl.reshape(total, (C // 8, 8))
    ends = tl.sum(tl.where(column[None, :] == 7, by_block, 0.0), 1)
    far = tl.broadcast_to(tl.reshape(ends, (2, 8))[:, None, :], (2, 64, 8))
    near = tl.broadcast_to(by_block[:, None, :], (C // 8, 8, 8))
    own_end = tl.reshape(tl.broadcast_to(ends[:, None], (C // 8, 8)), (C,))
    middle = tl.sum(tl.where(i == 63, total, 0.0), 0)
    end = tl.sum(tl.where(i == C - 1, total, 0.0), 0)
    return total, tl.reshape(far, (C, 8)), tl.reshape(near, (C, 8)), own_end, middle, end


@triton.jit
def load_keys(X, token, ok, group, G, ROWS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
              DOT: tl.constexpr):  # fmt: skip
    """[ROWS, KP] of q or k [tokens, G, K] from `token` on, zero where not ok and beyond K."""
    rows = token + tl.arange(0, ROWS)
    columns = tl.arange(0, KP)
    mask = ok[:, None]
    if K != KP:
        mask = mask & (columns < K)[None, :]
    at = (rows * G + group)[:, None] * K + columns[None, :]
    return tl.load(X + at, mask=mask, other=0.0).to(DOT)


@triton.jit
def load_values(X, token, ok, h, vt, H, ROWS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                DOT: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """[ROWS, BV] of v or do [tokens, H, V] from `token` on: columns vt BV ... of head h.

    With TMA, X is a descriptor and rows that are not ok hold their neighbours: every use weighs
    them with zero.
    """
    if TMA:
        x = X.load([token.to(tl.int32), h * V + vt * BV])
    else:
        rows = token + tl.arange(0, ROWS)
        at = (rows * H + h)[:, None] * V + vt * BV + tl.arange(0, BV)[None, :]
        x = tl.load(X + at, mask=ok[:, None], other=0.0)
    return x.to(DOT)


@triton.jit
def load_node(X, row, vt, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
              TMA: tl.constexpr):  # fmt: skip
    """[KP, BV] of the node whose first row is `row` in X [rows, V]: columns vt BV ..."""
    if TMA:
        x = X.load([row.to(tl.int32), vt * BV])
    else:
        at = (row + tl.arange(0, KP))[:, None] * V + vt * BV + tl.arange(0, BV)[None, :]
        x = tl.load(X + at)
    return x.to(DOT)


@triton.jit
def weigh(scores, weights):
    """scores * weights in the dtype of the scores: in bf16 both are cut before the product, which
    keeps the scores out of fp32 registers (measured: a third of the kernel's time)."""
    return scores * weights.to(scores.dtype)
