"""The Triton kernel of rotary.py. Turning back is turning by the opposite angle, so the backward
pass is the same kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.causal_conv1d import document_positions
from kernels.checks import document_lengths
from kernels.custom_operator import make_operator
from kernels.fused.rows import with_rows

ROTATED_ROWS = 4
"""Rows of heads of a program."""


@triton.jit(do_not_specialize=["rows", "T"])
def rotary_kernel(
    x_, table, positions, y_, rows, T, H, apart, P, direction,
    HALF: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    token, h = row // H, row % H
    position = tl.load(positions + token, mask=there, other=0) if PACKED else token % T
    i = tl.arange(0, BLOCK)
    ok = there[:, None] & (i < HALF)[None, :]
    turn = position[:, None] * HALF + i[None, :]
    cos = tl.load(table + turn, mask=ok, other=0.0).to(tl.float32)
    sin = tl.load(table + P * HALF + turn, mask=ok, other=0.0).to(tl.float32) * direction
    x = x_ + (token.to(tl.int64) * apart + h * 2 * HALF)[:, None] + i[None, :]
    first = tl.load(x, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=ok, other=0.0).to(tl.float32)
    y = y_ + row.to(tl.int64)[:, None] * 2 * HALF + i[None, :]
    tl.store(y, (first * cos - second * sin).to(y_.dtype.element_ty), mask=ok)
    tl.store(y + HALF, (second * cos + first * sin).to(y_.dtype.element_ty), mask=ok)


def _turn(x: Tensor, table: Tensor, cu_seqlens: Tensor | None, direction: float) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    B, T, H, S = x.shape
    positions = table
    if cu_seqlens is not None:
        positions = document_positions(document_lengths(B, T, cu_seqlens), x.device)
    x, apart = with_rows(x, 2)
    rows = B * T * H
    rotary_kernel[(triton.cdiv(rows, ROTATED_ROWS),)](
        x, table, positions, y, rows, T, H, apart, table.shape[1], direction,
        HALF=S // 2, BLOCK=triton.next_power_of_2(S // 2), PACKED=cu_seqlens is not None,
        ROWS=ROTATED_ROWS,
    )  # fmt: skip
    return y


def _rotate(x: Tensor, table: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    return [_turn(x, table, cu_seqlens, 1.0)]


def _rotate_shapes(x: Tensor, table: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format)]


def _rotate_backward(
    x: Tensor, table: Tensor, cu_seqlens: Tensor | None,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    return [_turn(grads[0], table, cu_seqlens, -1.0)]


def _rotate_backward_shapes(
    x: Tensor, table: Tensor, cu_seqlens: Tensor | None,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    return _rotate_shapes(x, table, cu_seqlens)


_rotate_operator = make_operator(
    "rotate", 1, (), _rotate, _rotate_shapes, _rotate_backward, _rotate_backward_shapes
)


def rotate_triton(x: Tensor, table: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """See rotary.py."""
    (y,) = _rotate_operator(x, table, cu_seqlens)
    return y
