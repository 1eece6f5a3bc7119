"""What the Triton kernels of both operators share: levels, decay, and weights inside 64 slots.

Slot i of 64 sees slot j < i through

    weight[i, j] = far[i, j // 8] * to_block_end[j]      j in an earlier block of 8 than i
    weight[i, j] = near[i, j % 8]                        j in i's own block of 8

since the level of a pair in different blocks of 8 depends on j's block alone. far and near, 16
numbers a slot ("compact"), are made once; a tile is two products with 0/1 matrices, which select
columns exactly, and the same matrices transposed sum a tile's gradient to the compact form.
"""

import triton
import triton.language as tl


@triton.jit
def bit_length(x):
    """Bit length of small non-negative int32, through the exponent of a float."""
    exponent = (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(x == 0, 0, exponent)


@triton.jit
def decay_over(segment):
    """exp of a sum of gates, which is at most 0 but for rounding."""
    return tl.exp(tl.minimum(segment, 0.0).to(tl.float32))


@triton.jit
def selectors(dtype: tl.constexpr):
    """far [16, 64] and near [16, 64]: compact [64, 16] @ them gives a weight for each column."""
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 64)[None, :]
    far = (row == (column >> 3)).to(dtype)
    near = (row == ((column & 7) + 8)).to(dtype)
    return far, near


@triton.jit
def selectors_transposed(dtype: tl.constexpr):
    """`selectors` [64, 16], built that way: a tile @ them sums to the compact form."""
    row = tl.arange(0, 16)[None, :]
    column = tl.arange(0, 64)[:, None]
    far = (row == (column >> 3)).to(dtype)
    near = (row == ((column & 7) + 8)).to(dtype)
    return far, near


@triton.jit
def same_block():
    """[64, 64]: row and column lie in the same block of 8."""
    r = tl.arange(0, 64)
    return (r >> 3)[:, None] == (r >> 3)[None, :]


@triton.jit
def power_above(x):
    """(p, 1 / p): the power of two above x >= 0, at least 2**-126. x / p is at most 1, so fp16
    holds it; multiplying by either is exact."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) + 1
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return power, ((254 - exponent) << 23).to(tl.float32, bitcast=True)
