"""The Triton kernels of norms.py. A row is what is normalised together; a program takes several of
them, one after the other, and adds up their share of the weight's gradient as it goes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.custom_operator import make_operator
from kernels.fused.rows import programs_for, rows_of, warps_for, with_rows


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_, y_, weight_, s_, n_, scale_, rows, N, eps, HAS_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    ok = columns < N
    weight = tl.load(weight_ + columns, mask=ok, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * N + columns
        s = tl.load(x_ + at, mask=ok, other=0.0).to(tl.float32)
        if HAS_Y:
            s += tl.load(y_ + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(s_ + at, s.to(s_.dtype.element_ty), mask=ok)
        scale = tl.rsqrt(tl.sum(s * s, 0) / N + eps)
        tl.store(scale_ + row, scale)
        tl.store(n_ + at, (s * scale * weight).to(n_.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    s_, weight_, scale_, ds_, dn_, dx_, dy_, dweight_, rows, N,
    HAS_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    ok = columns < N
    weight = tl.load(weight_ + columns, mask=ok, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * N + columns
        scale = tl.load(scale_ + row)
        normed = tl.load(s_ + at, mask=ok, other=0.0).to(tl.float32) * scale
        dn = tl.load(dn_ + at, mask=ok, other=0.0).to(tl.float32)
        dweight += dn * normed
        dn *= weight
        dx = scale * (dn - normed * (tl.sum(dn * normed, 0) / N))
        if HAS_Y:
            dx += tl.load(ds_ + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(dy_ + at, dx.to(dy_.dtype.element_ty), mask=ok)
        tl.store(dx_ + at, dx.to(dx_.dtype.element_ty), mask=ok)
    tl.store(dweight_ + tl.program_id(0) * N + columns, dweight, mask=ok)


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> list[Tensor]:
    n, scale = _norm_shapes(x, weight, eps, dtype)
    rows, N = rows_of(x)
    rms_norm_kernel[(programs_for(rows, x.device),)](
        x, x, weight, x, n, scale, rows, N, eps,
        HAS_Y=False, BLOCK=triton.next_power_of_2(N), num_warps=warps_for(N),
    )  # fmt: skip
    return [n, scale]


def _norm_shapes(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)]


def _norm_backward(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    return _backward(x, None, weight, kept[0], grads[0], grads[0])


def _norm_backward_shapes(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x), torch.empty_like(weight)]


def _add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> list[Tensor]:
    s, n, scale = _add_norm_shapes(x, y, weight, eps, dtype)
    rows, N = rows_of(x)
    rms_norm_kernel[(programs_for(rows, x.device),)](
        x, y, weight, s, n, scale, rows, N, eps,
        HAS_Y=True, BLOCK=triton.next_power_of_2(N), num_warps=warps_for(N),
    )  # fmt: skip
    return [s, n, scale]


def _add_norm_shapes(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    return [torch.empty_like(x), *_norm_shapes(x, weight, eps, dtype)]


def _add_norm_backward(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    s, scale = kept
    return _backward(s, y, weight, scale, *grads)


def _add_norm_backward_shapes(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype,
    kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x), torch.empty_like(y), torch.empty_like(weight)]


def _backward(
    s: Tensor, y: Tensor | None, weight: Tensor, scale: Tensor, ds: Tensor, dn: Tensor
) -> list[Tensor]:
    rows, N = rows_of(s)
    programs = programs_for(rows, s.device)
    dx = torch.empty_like(s)
    dy = dx if y is None else torch.empty_like(y)
    dweight = s.new_empty(programs, N, dtype=torch.float32)
    rms_norm_backward_kernel[(programs,)](
        s, weight, scale, ds, dn, dx, dy, dweight, rows, N,
        HAS_Y=y is not None, BLOCK=triton.next_power_of_2(N), num_warps=warps_for(N),
    )  # fmt: skip
    through = [dx] if y is None else [dx, dy]
    return [*through, dweight.sum(0).to(weight.dtype)]


_rms_norm = make_operator(
    "rms_norm", 1, (1,), _norm, _norm_shapes, _norm_backward, _norm_backward_shapes
)
_add_rms_norm = make_operator(
    "add_rms_norm", 2, (0, 2), _add_norm, _add_norm_shapes, _add_norm_backward,
    _add_norm_backward_shapes,
)  # fmt: skip


def add_rms_norm_triton(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See norms.py."""
    x = x.contiguous()
    if y is None:
        (n,) = _rms_norm(x, weight, eps, dtype)
        return x, n
    s, n = _add_rms_norm(x, y.contiguous(), weight, eps, dtype)
    return s, n


@triton.jit(do_not_specialize=["rows"])
def l2_norm_kernel(
    x_, y_, rows, apart, H, K, eps, scale, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    ok = (row < rows)[:, None] & (columns < K)[None, :]
    at = ((row // H).to(tl.int64) * apart + row % H * K)[:, None] + columns[None, :]
    x = tl.load(x_ + at, mask=ok, other=0.0).to(tl.float32)
    y = x * (tl.rsqrt(tl.sum(x * x, 1) + eps) * scale)[:, None]
    tl.store(
        y_ + row.to(tl.int64)[:, None] * K + columns[None, :], y.to(y_.dtype.element_ty), mask=ok
    )


@triton.jit(do_not_specialize=["rows"])
def l2_norm_backward_kernel(
    x_, dy_, dx_, rows, apart, H, K, eps, scale, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    ok = (row < rows)[:, None] & (columns < K)[None, :]
    at = ((row // H).to(tl.int64) * apart + row % H * K)[:, None] + columns[None, :]
    x = tl.load(x_ + at, mask=ok, other=0.0).to(tl.float32)
    here = row.to(tl.int64)[:, None] * K + columns[None, :]
    dy = tl.load(dy_ + here, mask=ok, other=0.0).to(tl.float32)
    length = tl.rsqrt(tl.sum(x * x, 1) + eps)
    normed = x * length[:, None]
    dx = (dy - normed * tl.sum(dy * normed, 1)[:, None]) * (length * scale)[:, None]
    tl.store(dx_ + here, dx.to(dx_.dtype.element_ty), mask=ok)


L2_ROWS = 8
"""Rows of a program of the l2 norm, which has nothing to add up."""


def _l2(x: Tensor, eps: float, scale: float) -> list[Tensor]:
    (y,) = _l2_shapes(x, eps, scale)
    rows, K = rows_of(x)
    x, apart = with_rows(x, 2)
    l2_norm_kernel[(triton.cdiv(rows, L2_ROWS),)](
        x, y, rows, apart, x.shape[-2], K, eps, scale, BLOCK=triton.next_power_of_2(K), ROWS=L2_ROWS
    )
    return [y]


def _l2_shapes(x: Tensor, eps: float, scale: float) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format)]


def _l2_backward(
    x: Tensor, eps: float, scale: float, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    (dx,) = _l2_shapes(x, eps, scale)
    rows, K = rows_of(x)
    x, apart = with_rows(x, 2)
    l2_norm_backward_kernel[(triton.cdiv(rows, L2_ROWS),)](
        x, grads[0], dx, rows, apart, x.shape[-2], K, eps, scale,
        BLOCK=triton.next_power_of_2(K), ROWS=L2_ROWS,
    )  # fmt: skip
    return [dx]


def _l2_backward_shapes(
    x: Tensor, eps: float, scale: float, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    return _l2_shapes(x, eps, scale)


_l2_norm = make_operator("l2_norm", 1, (), _l2, _l2_shapes, _l2_backward, _l2_backward_shapes)


def l2_norm_triton(x: Tensor, eps: float, scale: float) -> Tensor:
    """See norms.py; x [..., H, K]."""
    (y,) = _l2_norm(x, eps, scale)
    return y
