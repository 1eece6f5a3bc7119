"""The small layers that all architectures share: projections, norms, SwiGLU, the short convolution.

Modules allocate and never initialise; models/initialize.py owns every starting value. Norms and
gates compute in fp32 (or fp64 where the input is), also under autocast; projections follow the
autocast that surrounds the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step


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


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; fp32 inside and out."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(at_least_fp32(x), self.weight.shape, self.weight, self.eps)


class GateThenNorm(RMSNorm):
    """RMSNorm(x * silu(gate)): Mamba-2's order."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(at_least_fp32(x) * F.silu(at_least_fp32(gate)))


class NormThenGate(RMSNorm):
    """RMSNorm(x) * silu(gate): Gated DeltaNet's order."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(at_least_fp32(gate))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model: int, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, hidden_size)
        self.up_proj = Linear(d_model, hidden_size)
        self.down_proj = Linear(hidden_size, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
        y, state = causal_conv1d(
            x,
            self.weight,
            self.bias,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            return_final_state=state is not None,
        )
        return F.silu(y), state

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, channels], one token."""
        y, state = causal_conv1d_step(x, self.weight, self.bias, state)
        return F.silu(y), state
