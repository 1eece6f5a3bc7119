"""The Triton kernels of convolution.py.

A token's position in its document says how far back it may look; so packed documents and whole
rows are one kernel. The backward pass goes over slices of tokens: one kernel computes the gradient
before the activation; another sums the W results that a token enters. Sums over tokens, for weight
and bias, are one number a program, added up afterwards in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.causal_conv1d import document_positions
from kernels.checks import document_lengths
from kernels.custom_operator import make_operator
from kernels.fused.rows import with_rows

BLOCK_T = 16
BLOCK_D = 128
BACKWARD_BLOCK_T = 128
BACKWARD_BLOCK_D = 64
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
    x_, weight_, bias_, positions, dy_, ds_, dbias_, begin, end, tokens, T, D, apart,
    W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """ds, the gradient of the convolution before its activation, of tokens begin to end and the
    W - 1 after them; its sum over those before the end, for the bias."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok_d = d < D
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ + d, mask=ok_d, other=0.0).to(tl.float32)
    t = begin + tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = (t < end + W - 1) & (t < tokens)
    position = position_of(t, there, positions, T, PACKED)
    y = convolved(x_, weight_, bias, t, position, there, d, ok_d, apart, D, W)
    sigmoid = tl.sigmoid(y)
    ok = there[:, None] & ok_d[None, :]
    dy = tl.load(dy_ + t.to(tl.int64)[:, None] * D + d[None, :], mask=ok, other=0.0)
    ds = dy.to(tl.float32) * sigmoid * (1 + y * (1 - sigmoid))
    tl.store(ds_ + (t - begin).to(tl.int64)[:, None] * D + d[None, :], ds, mask=ok)
    if BIAS:
        dbias = tl.sum(tl.where((t < end)[:, None], ds, 0.0), 0)
        tl.store(dbias_ + tl.program_id(1) * D + d, dbias, mask=ok_d)


@triton.jit(do_not_specialize=["begin", "end", "tokens", "T"])
def convolution_inputs_kernel(
    x_, weight_, positions, ds_, dx_, dweight_, begin, end, tokens, T, D, apart,
    W: tl.constexpr, PACKED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of tokens begin to end what they give to the W results that they enter: dx, and x ds summed
    over the tokens of a program, for the weight."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok_d = d < D
    part = tl.program_id(1)
    t = begin + part * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = (t < end)[:, None] & ok_d[None, :]
    x = tl.load(x_ + t.to(tl.int64)[:, None] * apart + d[None, :], mask=ok, other=0.0)
    x = x.to(tl.float32)
    dx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for ahead in tl.static_range(W):
        later = t + ahead
        there = (later < tokens) & (t < end)
        position = position_of(later, there, positions, T, PACKED)
        there = there & (position >= ahead)  # of the same document
        at = (later - begin).to(tl.int64)[:, None] * D + d[None, :]
        ds = tl.load(ds_ + at, mask=there[:, None] & ok_d[None, :], other=0.0)
        weight = tl.load(weight_ + d * W + W - 1 - ahead, mask=ok_d, other=0.0).to(tl.float32)
        dx += ds * weight[None, :]
        at_weight = (part * W + W - 1 - ahead).to(tl.int64) * D + d
        tl.store(dweight_ + at_weight, tl.sum(ds * x, 0), mask=ok_d)
    dx_at = t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(dx_ + dx_at, dx.to(dx_.dtype.element_ty), mask=ok)


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
    slices = triton.cdiv(B * T, length)
    channels = triton.cdiv(D, BACKWARD_BLOCK_D)
    with_later, parts = (triton.cdiv(n, BACKWARD_BLOCK_T) for n in (length + W - 1, length))
    sizes = {
        "W": W, "PACKED": cu_seqlens is not None,
        "BLOCK_T": BACKWARD_BLOCK_T, "BLOCK_D": BACKWARD_BLOCK_D,
    }  # fmt: skip
    ds = x.new_empty(length + W - 1, D, dtype=torch.float32)
    dweight = x.new_empty(slices, parts, W, D, dtype=torch.float32)
    dbias = x.new_empty(slices, with_later, D, dtype=torch.float32)
    for i in range(slices):
        begin, end = i * length, min((i + 1) * length, B * T)
        convolution_gates_kernel[(channels, with_later)](
            x, weight, weight if bias is None else bias, positions, grads[0], ds, dbias[i],
            begin, end, B * T, T, D, apart, BIAS=bias is not None, **sizes,
        )  # fmt: skip
        convolution_inputs_kernel[(channels, parts)](
            x, weight, positions, ds, dx, dweight[i], begin, end, B * T, T, D, apart, **sizes
        )
    dbias = dbias.flatten(0, 1)
    dweight = dweight.flatten(0, 1).sum(0).T.contiguous()
    of_bias = [] if bias is None else [dbias.sum(0).to(bias.dtype)]
    return [dx, dweight.to(weight.dtype), *of_bias]


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
