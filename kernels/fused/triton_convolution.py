"""The Triton kernels of convolution.py.

A token's position in its document says how far back it may look; so packed documents and whole
rows are one kernel. The backward pass goes over slices of tokens: one kernel computes the gradient
before the activation, and those of weight and bias over the tokens of a program; another sums the W
results that a token enters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.causal_conv1d import document_positions
from kernels.checks import document_lengths
from kernels.custom_operator import make_operator
from kernels.fused.rows import with_rows

BLOCK_T = 32
BACKWARD_BLOCK_T = 16
BACKWARD_WARPS = 4
BLOCK_D = 64
TOKENS_OF_A_PROGRAM = 1024
SLICE_TOKENS = 32768
"""The backward pass keeps one fp32 number for each token of a slice and channel; so a row of a
million tokens needs no more than one of thirty thousand."""


@triton.jit
def convolved(x_, weight_, bias, t, position, there, d, ok_d, apart, D, W: tl.constexpr):
    """The convolution of tokens t at channels d, [tokens, channels], before its activation."""
    result = tl.zeros((t.shape[0], d.shape[0]), tl.float32) + bias[None, :]
    for i in tl.static_range(W):
        back = W - 1 - i
        ok = (there & (position >= back))[:, None] & ok_d[None, :]
        x_at = (t - back).to(tl.int64)[:, None] * apart + d[None, :]
        x = tl.load(x_ + x_at, mask=ok, other=0.0)
        weight = tl.load(weight_ + d * W + i, mask=ok_d, other=0.0).to(tl.float32)
        result += x.to(tl.float32) * weight[None, :]
    return result


@triton.jit
def position_of(t, there, positions, T, PACKED: tl.constexpr):
    """Where tokens lie in their documents: by a table, or in rows of T."""
    return tl.load(positions + t, mask=there, other=0) if PACKED else t % T


@triton.jit(do_not_specialize=["tokens", "T"])
def convolution_kernel(
    x_, weight_, bias_, positions, y_, tokens, T, D, apart,
    W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok_d = d < D
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = t < tokens
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ + d, mask=ok_d, other=0.0).to(tl.float32)
    position = position_of(t, there, positions, T, PACKED)
    y = convolved(x_, weight_, bias, t, position, there, d, ok_d, apart, D, W)
    y = y * tl.sigmoid(y)
    ok = there[:, None] & ok_d[None, :]
    tl.store(y_ + t.to(tl.int64)[:, None] * D + d[None, :], y.to(y_.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["begin", "end", "tokens", "T"])
def convolution_gates_kernel(
    x_, weight_, bias_, positions, dy_, ds_, dweight_, dbias_, begin, end, tokens, T, D, apart,
    W: tl.constexpr, WP: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """ds, the gradient of the convolution before its activation, of tokens begin to end and the
    W - 1 after them; those of weight and bias over tokens begin to end."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok_d = d < D
    back = W - 1 - tl.arange(0, WP)
    at_weight = d[None, :] * W + tl.arange(0, WP)[:, None]
    ok_weight = (back >= 0)[:, None] & ok_d[None, :]
    weight = tl.load(weight_ + at_weight, mask=ok_weight, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ + d, mask=ok_d, other=0.0).to(tl.float32)
    # Not summed over tokens before the end: a sum over threads in every round costs more.
    dbias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dweight = tl.zeros((WP, BLOCK_T, BLOCK_D), tl.float32)
    for block in range(BLOCKS):
        t = begin + (tl.program_id(1) * BLOCKS + block) * BLOCK_T + tl.arange(0, BLOCK_T)
        there = (t < end + W - 1) & (t < tokens)
        position = position_of(t, there, positions, T, PACKED)
        seen = there[None, :] & (position[None, :] >= back[:, None]) & (back >= 0)[:, None]
        x_at = (t[None, :] - back[:, None]).to(tl.int64)[:, :, None] * apart + d[None, None, :]
        ok_x = seen[:, :, None] & ok_d[None, None, :]
        x = tl.load(x_ + x_at, mask=ok_x, other=0.0).to(tl.float32)
        y = tl.sum(x * weight[:, None, :], 0) + bias[None, :]
        sigmoid = tl.sigmoid(y)
        ok = there[:, None] & ok_d[None, :]
        dy_at = t.to(tl.int64)[:, None] * D + d[None, :]
        ds = tl.load(dy_ + dy_at, mask=ok, other=0.0).to(tl.float32)
        ds *= sigmoid * (1 + y * (1 - sigmoid))
        tl.store(ds_ + (t - begin).to(tl.int64)[:, None] * D + d[None, :], ds, mask=ok)
        own = tl.where((t < end)[:, None], ds, 0.0)  # those after the end are the next slice's
        dbias += own
        dweight += own[None, :, :] * x
    part = tl.program_id(1)
    tl.store(dweight_ + part * D * W + at_weight, tl.sum(dweight, 1), mask=ok_weight)
    if BIAS:
        tl.store(dbias_ + part * D + d, tl.sum(dbias, 0), mask=ok_d)


@triton.jit(do_not_specialize=["begin", "end", "tokens", "T"])
def convolution_input_kernel(
    weight_, positions, ds_, dx_, begin, end, tokens, T, D,
    W: tl.constexpr, WP: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx of tokens begin to end: from the W results that a token enters."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok_d = d < D
    ahead = tl.arange(0, WP)
    at_weight = d[None, :] * W + (W - 1 - ahead)[:, None]
    ok_weight = (ahead < W)[:, None] & ok_d[None, :]
    weight = tl.load(weight_ + at_weight, mask=ok_weight, other=0.0).to(tl.float32)
    t = begin + tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    later = t[None, :] + ahead[:, None]
    there = (later < tokens) & (ahead < W)[:, None] & (t < end)[None, :]
    position = position_of(later, there, positions, T, PACKED)
    there = there & (position >= ahead[:, None])  # of the same document
    at = (later - begin).to(tl.int64)[:, :, None] * D + d[None, None, :]
    ds = tl.load(ds_ + at, mask=there[:, :, None] & ok_d[None, None, :], other=0.0)
    dx = tl.sum(ds * weight[:, None, :], 0).to(dx_.dtype.element_ty)
    ok = (t < end)[:, None] & ok_d[None, :]
    tl.store(dx_ + t.to(tl.int64)[:, None] * D + d[None, :], dx, mask=ok)


def _positions(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The table; any tensor where there is none."""
    if cu_seqlens is None:
        return x
    return document_positions(document_lengths(x.shape[0], x.shape[1], cu_seqlens), x.device)


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    (y,) = _convolution_shapes(x, weight, bias, cu_seqlens)
    B, T, D = x.shape
    positions = _positions(x, cu_seqlens)
    x, apart = with_rows(x)
    grid = (triton.cdiv(D, BLOCK_D), triton.cdiv(B * T, BLOCK_T))
    convolution_kernel[grid](
        x, weight, weight if bias is None else bias, positions, y, B * T, T, D, apart,
        W=weight.shape[1], BIAS=bias is not None, PACKED=cu_seqlens is not None,
        BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return [y]


def _convolution_shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format)]


def _convolution_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    (dx,) = _convolution_shapes(x, weight, bias, cu_seqlens)
    B, T, D = x.shape
    W = weight.shape[1]
    positions = _positions(x, cu_seqlens)
    x, apart = with_rows(x)
    length = min(B * T, SLICE_TOKENS)
    blocks = min(
        TOKENS_OF_A_PROGRAM // BACKWARD_BLOCK_T,
        triton.next_power_of_2(triton.cdiv(length, BACKWARD_BLOCK_T)),
    )
    parts = triton.cdiv(length + W - 1, BACKWARD_BLOCK_T * blocks)
    slices = triton.cdiv(B * T, length)
    channels = triton.cdiv(D, BLOCK_D)
    sizes = {
        "W": W, "WP": triton.next_power_of_2(W), "PACKED": cu_seqlens is not None,
        "BLOCK_T": BACKWARD_BLOCK_T, "BLOCK_D": BLOCK_D, "num_warps": BACKWARD_WARPS,
    }  # fmt: skip
    ds = x.new_empty(length + W - 1, D, dtype=torch.float32)
    dweight = x.new_empty(slices, parts, D, W, dtype=torch.float32)
    dbias = x.new_empty(slices, parts, D, dtype=torch.float32)
    for i in range(slices):
        begin, end = i * length, min((i + 1) * length, B * T)
        convolution_gates_kernel[(channels, parts)](
            x, weight, weight if bias is None else bias, positions, grads[0], ds, dweight[i],
            dbias[i], begin, end, B * T, T, D, apart,
            BIAS=bias is not None, BLOCKS=blocks, **sizes,
        )  # fmt: skip
        convolution_input_kernel[(channels, triton.cdiv(end - begin, BACKWARD_BLOCK_T))](
            weight, positions, ds, dx, begin, end, B * T, T, D, **sizes
        )
    dweight, dbias = dweight.flatten(0, 1), dbias.flatten(0, 1)
    of_bias = [] if bias is None else [dbias.sum(0).to(bias.dtype)]
    return [dx, dweight.sum(0).to(weight.dtype), *of_bias]


def _convolution_backward_shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    of_bias = [] if bias is None else [torch.empty_like(bias)]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [dx, torch.empty_like(weight), *of_bias]


_short_convolution = make_operator(
    "short_convolution", 1, (), _convolution, _convolution_shapes, _convolution_backward,
    _convolution_backward_shapes,
)  # fmt: skip


def short_convolution_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """See convolution.py."""
    (y,) = _short_convolution(x, weight.contiguous(), bias, cu_seqlens)
    return y
