"""The Triton kernels of gates.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.custom_operator import make_operator
from kernels.fused.rows import programs_for, with_rows

ELEMENTS = 2048
"""Numbers of a program of an elementwise kernel."""
SHORT_ROWS = 64
"""Rows of a program's step where rows are short."""


@triton.jit
def softplus(x):
    """log(1 + e), e = exp(x); x itself where the difference is rounding, as torch has it.

    1 + e rounds e; log(u) * e / (u - 1) at the rounded u = 1 + e takes that back.
    """
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def swiglu_kernel(gate_, up_, y_, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    gate = tl.load(gate_ + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ + at, (gate * tl.sigmoid(gate) * up).to(y_.dtype.element_ty), mask=ok)


@triton.jit
def swiglu_backward_kernel(gate_, up_, dy_, dgate_, dup_, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    gate = tl.load(gate_ + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ + at, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load(dy_ + at, mask=ok, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dgate_ + at, dgate.to(dgate_.dtype.element_ty), mask=ok)
    tl.store(dup_ + at, (dy * gate * sigmoid).to(dup_.dtype.element_ty), mask=ok)


def _swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    y = torch.empty_like(gate)
    size = gate.numel()
    swiglu_kernel[(triton.cdiv(size, ELEMENTS),)](gate, up, y, size, BLOCK=ELEMENTS, num_warps=8)
    return [y]


def _swiglu_shapes(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [torch.empty_like(gate)]


def _swiglu_backward(
    gate: Tensor, up: Tensor, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    size = gate.numel()
    swiglu_backward_kernel[(triton.cdiv(size, ELEMENTS),)](
        gate, up, grads[0], dgate, dup, size, BLOCK=ELEMENTS, num_warps=8
    )
    return [dgate, dup]


def _swiglu_backward_shapes(
    gate: Tensor, up: Tensor, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(gate), torch.empty_like(up)]


_swiglu_operator = make_operator(
    "swiglu", 1, (), _swiglu, _swiglu_shapes, _swiglu_backward, _swiglu_backward_shapes
)


def swiglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    """See gates.py."""
    (y,) = _swiglu_operator(gate.contiguous(), up.contiguous())
    return y


@triton.jit(do_not_specialize=["rows"])
def level_softplus_kernel(
    d_, P_, b_, y_, rows, W, WP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, WP)
    square = (w < W)[:, None] & (w < W)[None, :]
    # Products over the second axis of P: P^T as [inputs, outputs].
    P_turned = tl.load(P_ + w[None, :] * W + w[:, None], mask=square, other=0.0)
    b = tl.load(b_ + w, mask=w < W, other=0.0)
    blocks = tl.cdiv(rows, ROWS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        ok = (row < rows)[:, None] & (w < W)[None, :]
        at = row[:, None] * W + w[None, :]
        d = tl.load(d_ + at, mask=ok, other=0.0).to(tl.float32)
        z = tl.dot(d, P_turned, input_precision="ieee") + b[None, :]
        tl.store(y_ + at, softplus(z), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def level_softplus_backward_kernel(
    d_, P_, b_, dy_, dd_, dP_, db_, rows, W, WP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, WP)
    square = (w < W)[:, None] & (w < W)[None, :]
    P = tl.load(P_ + w[:, None] * W + w[None, :], mask=square, other=0.0)
    P_turned = tl.load(P_ + w[None, :] * W + w[:, None], mask=square, other=0.0)
    b = tl.load(b_ + w, mask=w < W, other=0.0)
    dP = tl.zeros((WP, WP), tl.float32)
    db = tl.zeros((WP,), tl.float32)
    blocks = tl.cdiv(rows, ROWS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        ok = (row < rows)[:, None] & (w < W)[None, :]
        at = row[:, None] * W + w[None, :]
        d = tl.load(d_ + at, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_ + at, mask=ok, other=0.0).to(tl.float32)
        z = tl.dot(d, P_turned, input_precision="ieee") + b[None, :]
        dz = dy * tl.sigmoid(z)
        dd = tl.dot(dz, P, input_precision="ieee")
        tl.store(dd_ + at, dd.to(dd_.dtype.element_ty), mask=ok)
        db += tl.sum(dz, 0)
        # The transposed dz anew from transposed loads: some Triton versions compile products with
        # a transposed result wrongly.
        turned = row[None, :] * W + w[:, None]
        ok_turned = (w < W)[:, None] & (row < rows)[None, :]
        d_turned = tl.load(d_ + turned, mask=ok_turned, other=0.0).to(tl.float32)
        dy_turned = tl.load(dy_ + turned, mask=ok_turned, other=0.0).to(tl.float32)
        z_turned = tl.dot(P, d_turned, input_precision="ieee") + b[:, None]
        dP += tl.dot(dy_turned * tl.sigmoid(z_turned), d, input_precision="ieee")
    part = tl.program_id(0)
    tl.store(dP_ + part * W * W + w[:, None] * W + w[None, :], dP, mask=square)
    tl.store(db_ + part * W + w, db, mask=w < W)


def _level_programs(d: Tensor) -> tuple[int, int, int]:
    """(rows, programs, W padded for products)"""
    W = d.shape[-1]
    rows = d.numel() // W
    blocks = triton.cdiv(rows, SHORT_ROWS)
    return rows, programs_for(blocks, d.device), max(16, triton.next_power_of_2(W))


def _levels(d: Tensor, P: Tensor, b: Tensor) -> list[Tensor]:
    (y,) = _levels_shapes(d, P, b)
    rows, programs, WP = _level_programs(d)
    level_softplus_kernel[(programs,)](d, P, b, y, rows, d.shape[-1], WP=WP, ROWS=SHORT_ROWS)
    return [y]


def _levels_shapes(d: Tensor, P: Tensor, b: Tensor) -> list[Tensor]:
    return [torch.empty_like(d, dtype=torch.float32)]


def _levels_backward(
    d: Tensor, P: Tensor, b: Tensor, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    rows, programs, WP = _level_programs(d)
    W, dd = d.shape[-1], torch.empty_like(d)
    dP, db = (d.new_empty(programs, *x.shape, dtype=torch.float32) for x in (P, b))
    level_softplus_backward_kernel[(programs,)](
        d, P, b, grads[0], dd, dP, db, rows, W, WP=WP, ROWS=SHORT_ROWS
    )
    return [dd, dP.sum(0), db.sum(0)]


def _levels_backward_shapes(
    d: Tensor, P: Tensor, b: Tensor, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(d), torch.empty_like(P), torch.empty_like(b)]


_level_softplus = make_operator(
    "level_softplus", 1, (), _levels, _levels_shapes, _levels_backward, _levels_backward_shapes
)


def level_softplus_triton(d: Tensor, P: Tensor, b: Tensor) -> Tensor:
    """See gates.py."""
    (y,) = _level_softplus(d.contiguous(), P.contiguous(), b)
    return y


@triton.jit(do_not_specialize=["rows"])
def step_values_kernel(
    x_, dt_, dt_bias_, A_log_, v_, g_, rows, x_apart, dt_apart, H, V,
    BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, h = (row // H).to(tl.int64), row % H  # divided in 32 bits: 64 cost a hundred steps
    there = row < rows
    columns = tl.arange(0, BV)
    ok = there[:, None] & (columns < V)[None, :]
    dt = tl.load(dt_ + token * dt_apart + h, mask=there, other=0.0).to(tl.float32)
    delta = softplus(dt + tl.load(dt_bias_ + h, mask=there, other=0.0))
    x_at = (token * x_apart + h * V)[:, None] + columns[None, :]
    x = tl.load(x_ + x_at, mask=ok, other=0.0).to(tl.float32)
    v_at = row.to(tl.int64)[:, None] * V + columns[None, :]
    tl.store(v_ + v_at, (x * delta[:, None]).to(v_.dtype.element_ty), mask=ok)
    rate = tl.exp(tl.load(A_log_ + h, mask=there, other=0.0))
    tl.store(g_ + row, -rate * delta, mask=there)


@triton.jit(do_not_specialize=["rows"])
def step_values_backward_kernel(
    x_, dt_, dt_bias_, A_log_, dv_, dg_, dx_, ddt_, dA_, rows, x_apart, dt_apart, H, V,
    BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, h = (row // H).to(tl.int64), row % H  # divided in 32 bits: 64 cost a hundred steps
    there = row < rows
    columns = tl.arange(0, BV)
    ok = there[:, None] & (columns < V)[None, :]
    dt = tl.load(dt_ + token * dt_apart + h, mask=there, other=0.0).to(tl.float32)
    biased = dt + tl.load(dt_bias_ + h, mask=there, other=0.0)
    delta = softplus(biased)
    x_at = (token * x_apart + h * V)[:, None] + columns[None, :]
    x = tl.load(x_ + x_at, mask=ok, other=0.0).to(tl.float32)
    v_at = row.to(tl.int64)[:, None] * V + columns[None, :]
    dv = tl.load(dv_ + v_at, mask=ok, other=0.0).to(tl.float32)
    tl.store(dx_ + v_at, (dv * delta[:, None]).to(dx_.dtype.element_ty), mask=ok)
    dg = tl.load(dg_ + row, mask=there, other=0.0)
    rate = tl.exp(tl.load(A_log_ + h, mask=there, other=0.0))
    ddelta = tl.sum(dv * x, 1) - rate * dg
    tl.store(ddt_ + row, ddelta * tl.sigmoid(biased), mask=there)
    tl.store(dA_ + row, -rate * delta * dg, mask=there)


def _steps(x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor) -> list[Tensor]:
    v, g = _steps_shapes(x, dt, dt_bias, A_log)
    H, V = x.shape[-2:]
    x, x_apart = with_rows(x, 2)
    dt, dt_apart = with_rows(dt)
    step_values_kernel[(triton.cdiv(g.numel(), SHORT_ROWS),)](
        x, dt, dt_bias, A_log, v, g, g.numel(), x_apart, dt_apart, H, V,
        BV=triton.next_power_of_2(V), ROWS=SHORT_ROWS,
    )  # fmt: skip
    return [v, g]


def _steps_shapes(x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor) -> list[Tensor]:
    v = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [v, x.new_empty(x.shape[:-1], dtype=torch.float32)]


def _steps_backward(
    x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    H, V = x.shape[-2:]
    dx, ddt = _steps_shapes(x, dt, dt_bias, A_log)
    dA = torch.empty_like(ddt)
    x, x_apart = with_rows(x, 2)
    near_dt, dt_apart = with_rows(dt)
    step_values_backward_kernel[(triton.cdiv(ddt.numel(), SHORT_ROWS),)](
        x, near_dt, dt_bias, A_log, grads[0], grads[1], dx, ddt, dA, ddt.numel(), x_apart,
        dt_apart, H, V, BV=triton.next_power_of_2(V), ROWS=SHORT_ROWS,
    )  # fmt: skip
    return [dx, ddt.to(dt.dtype), ddt.view(-1, H).sum(0), dA.view(-1, H).sum(0)]


def _steps_backward_shapes(
    x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    dx, _ = _steps_shapes(x, dt, dt_bias, A_log)
    ddt = torch.empty_like(dt, memory_format=torch.contiguous_format)
    return [dx, ddt, torch.empty_like(dt_bias), torch.empty_like(A_log)]


_step_values = make_operator(
    "step_values", 2, (), _steps, _steps_shapes, _steps_backward, _steps_backward_shapes
)


def step_values_triton(
    x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor
) -> tuple[Tensor, Tensor]:
    """See gates.py."""
    v, g = _step_values(x, dt, dt_bias, A_log)
    return v, g
