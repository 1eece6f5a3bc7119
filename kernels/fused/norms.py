"""Norms with what comes right before and after them: the residual stream, a skip, a gate.

    add_rms_norm      s = x + y;   n = s / sqrt(mean(s^2) + eps) * weight
    gated_rms_norm    gate first:  RMSNorm((o + D * x) * silu(z)) * weight         Mamba-2
                      norm first:  RMSNorm(o) * weight * silu(z)                   Gated DeltaNet
    l2_norm           x / sqrt(sum(x^2) + eps) * scale

All are computed in fp32 (fp64 for fp64). On a GPU each is one Triton kernel, elsewhere plain torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_shape
from kernels.dispatch import Backend, choose_backend

MAX_SIZE = 16384
"""Numbers that are normalised together at most: a program holds them in registers."""


def add_rms_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(x + y, RMSNorm(x + y)): a block's output joins the residual stream, the next one reads it.

    Args:
        x: [..., D], fp32 (or fp64).  y: [..., D], any float dtype; None for zero.
        weight: [D].
        dtype: of the second result; the first has x's.
    """
    check_shape("weight", weight, "D", x.shape[-1:])
    if choose_backend(backend, x.device, "add_rms_norm", _obstacle(x, weight)) == "triton":
        from kernels.fused.triton_norms import add_rms_norm_triton

        return add_rms_norm_triton(x, y, weight, eps, dtype)
    s = x if y is None else x + y
    return s, F.rms_norm(s, weight.shape, weight, eps).to(dtype)


def gated_rms_norm(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    norm_first: bool,
    skip: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """An operator's result, normalised and gated, as the output projection reads it.

    Args:
        o, gate: [..., H, V].
        weight: [V] where the norm comes first and spans a head, [H * V] where it comes after the
            gate and spans all heads.
        dtype: of the result, [..., H, V].
        skip: (x [..., H, V], D [H]); gate first only.
    """
    H, V = o.shape[-2:]
    check_shape("gate", gate, " ".join("?" * (o.dim() - 2)) + " H V", tuple(o.shape))
    check_shape("weight", weight, "N", (V if norm_first else H * V,))
    if choose_backend(backend, o.device, "gated_rms_norm", _obstacle(o, weight)) == "triton":
        from kernels.fused.triton_gated_norm import gated_rms_norm_triton

        return gated_rms_norm_triton(o, gate, weight, eps, dtype, norm_first, skip)
    wide = torch.promote_types(o.dtype, torch.float32)
    o, gate = o.to(wide), gate.to(wide)
    if norm_first:
        return (F.rms_norm(o, weight.shape, weight, eps) * F.silu(gate)).to(dtype)
    if skip is not None:
        x, D = skip
        o = o + D[:, None] * x
    y = (o * F.silu(gate)).flatten(-2)
    return F.rms_norm(y, weight.shape, weight, eps).to(dtype).unflatten(-1, (H, V))


def l2_norm(x: Tensor, eps: float, scale: float, *, backend: Backend = "auto") -> Tensor:
    """x [..., K] over its length, times scale; in x's dtype."""
    if choose_backend(backend, x.device, "l2_norm", _obstacle(x, None)) == "triton":
        from kernels.fused.triton_norms import l2_norm_triton

        return l2_norm_triton(x, eps, scale)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * length * scale).to(x.dtype)


def _obstacle(x: Tensor, weight: Tensor | None) -> str | None:
    size = x.shape[-1] if weight is None else max(x.shape[-1], weight.shape[0])
    if x.dtype == torch.float64:
        return "its Triton kernel does not compute in fp64"
    if size > MAX_SIZE:
        return f"its Triton kernel normalises at most {MAX_SIZE} numbers: got {size}"
    return None
