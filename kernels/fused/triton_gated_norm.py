"""The Triton kernel of norms.gated_rms_norm. A row is what is normalised together: a head where the
norm comes first, all heads where the gate does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.custom_operator import make_operator
from kernels.fused.rows import programs_for, warps_for, with_rows


@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    o_, gate_, weight_, x_, D_, out_, scale_, rows, gate_apart, x_apart, HEADS, N, V, eps,
    NORM_FIRST: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """HEADS: rows of a token."""
    columns = tl.arange(0, BLOCK)
    ok = columns < N
    weight = tl.load(weight_ + columns, mask=ok, other=0.0).to(tl.float32)
    if SKIP:
        D = tl.load(D_ + columns // V, mask=ok, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        token, head = tl.cast(row // HEADS, tl.int64), row % HEADS
        at = tl.cast(row, tl.int64) * N + columns
        o = tl.load(o_ + at, mask=ok, other=0.0).to(tl.float32)
        gate_at = token * gate_apart + head * N + columns
        gate = tl.load(gate_ + gate_at, mask=ok, other=0.0).to(tl.float32)
        if SKIP:
            x = tl.load(x_ + token * x_apart + columns, mask=ok, other=0.0)
            o += D * x.to(tl.float32)
        opened = gate * tl.sigmoid(gate)
        if not NORM_FIRST:
            o *= opened
        scale = tl.rsqrt(tl.sum(o * o, 0) / N + eps)
        out = o * scale * weight
        if NORM_FIRST:
            out *= opened
        tl.store(scale_ + row, scale)
        tl.store(out_ + at, out.to(out_.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def gated_norm_backward_kernel(
    o_, gate_, weight_, x_, D_, scale_, dout_, do_, dgate_, dx_, dweight_, dD_,
    rows, gate_apart, x_apart, HEADS, N, V,
    NORM_FIRST: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    ok = columns < N
    weight = tl.load(weight_ + columns, mask=ok, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dD = tl.zeros((BLOCK,), tl.float32)
    if SKIP:
        D = tl.load(D_ + columns // V, mask=ok, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        token, head = tl.cast(row // HEADS, tl.int64), row % HEADS
        at = tl.cast(row, tl.int64) * N + columns
        o = tl.load(o_ + at, mask=ok, other=0.0).to(tl.float32)
        gate_at = token * gate_apart + head * N + columns
        gate = tl.load(gate_ + gate_at, mask=ok, other=0.0).to(tl.float32)
        dout = tl.load(dout_ + at, mask=ok, other=0.0).to(tl.float32)
        scale = tl.load(scale_ + row)
        if SKIP:
            x = tl.load(x_ + token * x_apart + columns, mask=ok, other=0.0).to(tl.float32)
            o += D * x
        sigmoid = tl.sigmoid(gate)
        opened = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))  # of silu
        if NORM_FIRST:
            normed = o * scale
            dweight += dout * opened * normed
            dgate = dout * normed * weight * slope
            dn = dout * opened * weight
            do = scale * (dn - normed * (tl.sum(dn * normed, 0) / N))
        else:
            normed = o * opened * scale
            dweight += dout * normed
            dn = dout * weight
            dy = scale * (dn - normed * (tl.sum(dn * normed, 0) / N))
            dgate = dy * o * slope
            do = dy * opened
        tl.store(do_ + at, do.to(do_.dtype.element_ty), mask=ok)
        tl.store(dgate_ + at, dgate.to(dgate_.dtype.element_ty), mask=ok)
        if SKIP:
            tl.store(dx_ + at, (do * D).to(dx_.dtype.element_ty), mask=ok)
            dD += do * x
    tl.store(dweight_ + tl.program_id(0) * N + columns, dweight, mask=ok)
    if SKIP:
        tl.store(dD_ + tl.program_id(0) * N + columns, dD, mask=ok)


def _gated(
    o: Tensor, gate: Tensor, weight: Tensor, x: Tensor | None, D: Tensor | None,
    eps: float, dtype: torch.dtype, norm_first: bool,
) -> list[Tensor]:  # fmt: skip
    out, scale = _gated_shapes(o, gate, weight, x, D, eps, dtype, norm_first)
    gate, gate_apart = with_rows(gate, 2)
    skip, skip_apart = (o, 0) if x is None else with_rows(x, 2)
    rows, N = scale.numel(), len(weight)
    gated_norm_kernel[(programs_for(rows, o.device),)](
        o, gate, weight, skip, weight if D is None else D, out, scale, rows, gate_apart,
        skip_apart, o.shape[-2] if norm_first else 1, N, o.shape[-1], eps,
        NORM_FIRST=norm_first, SKIP=x is not None, BLOCK=triton.next_power_of_2(N),
        num_warps=warps_for(N),
    )  # fmt: skip
    return [out, scale]


def _gated_shapes(
    o: Tensor, gate: Tensor, weight: Tensor, x: Tensor | None, D: Tensor | None,
    eps: float, dtype: torch.dtype, norm_first: bool,
) -> list[Tensor]:  # fmt: skip
    scales = o.shape[:-1] if norm_first else o.shape[:-2]
    return [torch.empty_like(o, dtype=dtype), o.new_empty(scales, dtype=torch.float32)]


def _gated_backward(
    o: Tensor, gate: Tensor, weight: Tensor, x: Tensor | None, D: Tensor | None,
    eps: float, dtype: torch.dtype, norm_first: bool, kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    (scale,) = kept
    do, dgate, dweight, *dskip = _gated_backward_shapes(
        o, gate, weight, x, D, eps, dtype, norm_first, kept, grads
    )
    gate, gate_apart = with_rows(gate, 2)
    skip, skip_apart = (o, 0) if x is None else with_rows(x, 2)
    rows, N = scale.numel(), len(weight)
    programs = programs_for(rows, o.device)
    parts = o.new_empty(2 if x is not None else 1, programs, N, dtype=torch.float32)
    gated_norm_backward_kernel[(programs,)](
        o, gate, weight, skip, weight if D is None else D, scale, grads[0], do, dgate,
        dskip[0] if dskip else do, parts[0], parts[-1], rows, gate_apart, skip_apart,
        o.shape[-2] if norm_first else 1, N, o.shape[-1],
        NORM_FIRST=norm_first, SKIP=x is not None, BLOCK=triton.next_power_of_2(N),
        num_warps=warps_for(N),
    )  # fmt: skip
    dweight = parts[0].sum(0).to(weight.dtype)
    if D is None:
        return [do, dgate, dweight]
    return [do, dgate, dweight, dskip[0], parts[1].sum(0).view(o.shape[-2:]).sum(1).to(D.dtype)]


def _gated_backward_shapes(
    o: Tensor, gate: Tensor, weight: Tensor, x: Tensor | None, D: Tensor | None,
    eps: float, dtype: torch.dtype, norm_first: bool, kept: list[Tensor], grads: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    shapes = [torch.empty_like(o), _whole(gate), torch.empty_like(weight)]
    return shapes if x is None or D is None else [*shapes, _whole(x), torch.empty_like(D)]


def _whole(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_gated_norm = make_operator(
    "gated_rms_norm", 1, (1,), _gated, _gated_shapes, _gated_backward, _gated_backward_shapes
)


def gated_rms_norm_triton(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    norm_first: bool,
    skip: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """See norms.py."""
    x, D = (None, None) if skip is None else skip
    (out,) = _gated_norm(o.contiguous(), gate, weight, x, D, eps, dtype, norm_first)
    return out
