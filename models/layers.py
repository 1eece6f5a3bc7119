"""The small layers that all architectures share: projections, norms, SwiGLU, the short convolution.

Modules allocate and never initialise; models/initialize.py owns every starting value. Norms and
gates compute in fp32 (or fp64 where the input is), also under autocast, and give what the
projection after them computes in; projections follow the autocast that surrounds the model. What
a GPU does in one kernel is kernels/fused/.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels.fused.convolution import short_convolution
from kernels.fused.gates import swiglu
from kernels.fused.norms import add_rms_norm, gated_rms_norm


def at_least_fp32(x: Tensor) -> Tensor:
    """bf16 and fp16 become fp32; fp32 and fp64 stay."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class Linear(nn.Linear):
    """A projection without bias, left uninitialised."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: models/initialize.py owns starting values."""


class Embedding(nn.Embedding):
    """Token embedding, left uninitialised; fp32 out, so that the residual stream is."""

    def reset_parameters(self) -> None:
        """Nothing: models/initialize.py owns starting values."""

    def forward(self, tokens: Tensor) -> Tensor:
        return at_least_fp32(super().forward(tokens))


def projection_dtype(x: Tensor) -> torch.dtype:
    """What a projection of x computes in: the autocast's dtype, or at least fp32."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return at_least_fp32(x).dtype


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """The norm of x; or, where y joins the residual stream x, (x + y, its norm). The stream
        stays at least fp32."""
        s, n = add_rms_norm(at_least_fp32(x), y, self.weight, self.eps, projection_dtype(x))
        return n if y is None else (s, n)


class GateThenNorm(RMSNorm):
    """RMSNorm((o + D x) * silu(gate)) over all heads: Mamba-2's order."""

    def forward(  # type: ignore[override]
        self, o: Tensor, gate: Tensor, skip: tuple[Tensor, Tensor]
    ) -> Tensor:
        """o, gate [..., H, V], skip (x [..., H, V], D [H]) -> [..., H * V]."""
        dtype = projection_dtype(o)
        y = gated_rms_norm(o, gate, self.weight, self.eps, dtype, norm_first=False, skip=skip)
        return y.flatten(-2)


class NormThenGate(RMSNorm):
    """RMSNorm(o) * silu(gate), each head by itself: Gated DeltaNet's order."""

    def forward(self, o: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """o, gate [..., H, V] -> [..., H * V]."""
        dtype = projection_dtype(o)
        y = gated_rms_norm(o, gate, self.weight, self.eps, dtype, norm_first=True)
        return y.flatten(-2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model: int, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, hidden_size)
        self.up_proj = Linear(d_model, hidden_size)
        self.down_proj = Linear(hidden_size, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class ShortConvolution(nn.Module):
    """silu(depthwise causal convolution) over `width` tokens of the same document."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def empty_state(self, batch_size: int) -> Tensor:
        """[B, channels, width - 1]: the inputs before the first token are zeros."""
        channels, width = self.weight.shape
        return self.weight.new_zeros(batch_size, channels, width - 1)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, channels] -> (same shape, state after the last token if one was given)."""
        if state is None:
            return short_convolution(x, self.weight, self.bias, cu_seqlens), None
        y, state = causal_conv1d(
            x, self.weight, self.bias, initial_state=state, return_final_state=True
        )
        return F.silu(y), state

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, channels], one token."""
        y, state = causal_conv1d_step(x, self.weight, self.bias, state)
        return F.silu(y), state
