"""The Triton kernel of convolution.py.

A token's position in its document says how far back it may look; so packed documents and whole
rows are one kernel. The backward pass computes the W results that a token enters anew, and adds up
the gradients of weight and bias over the tokens of a program.
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
"""With more, a program of the backward pass runs out of registers (255 on Hopper)."""
BLOCK_D = 64
TOKENS_OF_A_PROGRAM = 1024


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


@triton.jit(do_not_specialize=["tokens", "T"])
def convolution_backward_kernel(
    x_, weight_, bias_, positions, dy_, dx_, dweight_, dbias_, tokens, T, D, apart,
    W: tl.constexpr, WP: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok_d = d < D
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ + d, mask=ok_d, other=0.0).to(tl.float32)
    dbias = tl.zeros((BLOCK_D,), tl.float32)
    dweight = tl.zeros((BLOCK_D, WP), tl.float32)
    column = tl.arange(0, WP)
    for block in range(BLOCKS):
        t = (tl.program_id(1) * BLOCKS + block) * BLOCK_T + tl.arange(0, BLOCK_T)
        dx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for ahead in tl.static_range(W):
            later = t + ahead
            there = later < tokens
            position = position_of(later, there, positions, T, PACKED)
            there = there & (position >= ahead)  # of the same document
            y = convolved(x_, weight_, bias, later, position, there, d, ok_d, apart, D, W)
            sigmoid = tl.sigmoid(y)
            ok = there[:, None] & ok_d[None, :]
            dy_at = later.to(tl.int64)[:, None] * D + d[None, :]
            dy = tl.load(dy_ + dy_at, mask=ok, other=0.0).to(tl.float32)
            dy *= sigmoid * (1 + y * (1 - sigmoid))
            weight = tl.load(weight_ + d * W + W - 1 - ahead, mask=ok_d, other=0.0)
            dx += dy * weight.to(tl.float32)[None, :]
            if ahead == 0:
                dbias += tl.sum(dy, 0)
                for i in tl.static_range(W):
                    back = W - 1 - i
                    seen = (there & (position >= back))[:, None] & ok_d[None, :]
                    x_at = (t - back).to(tl.int64)[:, None] * apart + d[None, :]
                    x = tl.load(x_ + x_at, mask=seen, other=0.0).to(tl.float32)
                    share = tl.sum(dy * x, 0)
                    dweight += tl.where(column[None, :] == i, share[:, None], 0.0)
        ok = (t < tokens)[:, None] & ok_d[None, :]
        tl.store(
            dx_ + t.to(tl.int64)[:, None] * D + d[None, :], dx.to(dx_.dtype.element_ty), mask=ok
        )
    part = tl.program_id(1)
    at = part * D * W + d[:, None] * W + column[None, :]
    tl.store(dweight_ + at, dweight, mask=ok_d[:, None] & (column < W)[None, :])
    if BIAS:
        tl.store(dbias_ + part * D + d, dbias, mask=ok_d)


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
    blocks = min(
        TOKENS_OF_A_PROGRAM // BACKWARD_BLOCK_T,
        triton.next_power_of_2(-(-B * T // BACKWARD_BLOCK_T)),
    )
    programs = triton.cdiv(B * T, BACKWARD_BLOCK_T * blocks)
    dweight = x.new_empty(programs, D, W, dtype=torch.float32)
    dbias = x.new_empty(programs, D, dtype=torch.float32)
    convolution_backward_kernel[(triton.cdiv(D, BLOCK_D), programs)](
        x, weight, weight if bias is None else bias, positions, grads[0], dx, dweight, dbias,
        B * T, T, D, apart,
        W=W, WP=triton.next_power_of_2(W), BIAS=bias is not None, PACKED=cu_seqlens is not None,
        BLOCK_T=BACKWARD_BLOCK_T, BLOCK_D=BLOCK_D, BLOCKS=blocks,
    )  # fmt: skip
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
