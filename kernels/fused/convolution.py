"""The short convolution with its activation: silu(causal_conv1d(x)), documents apart.

On a GPU one Triton kernel, in fp32 whatever x is; elsewhere plain torch (kernels/causal_conv1d.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.causal_conv1d import causal_conv1d
from kernels.checks import check_shape
from kernels.dispatch import Backend, choose_backend

MAX_WIDTH = 16


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """silu(bias[d] + sum_i weight[d, i] x_{t-W+1+i}[d]), x before a document being 0.

    Args:
        x: [B, T, D], any float dtype.
        weight: [D, W].  bias: [D] or None.
        cu_seqlens: [N+1] integers on the CPU from 0 to T, needs B = 1: N packed documents.

    Returns:
        [B, T, D] in x's dtype.

    Raises:
        ValueError: a shape or cu_seqlens does not fit.
    """
    D, W = weight.shape
    check_shape("weight", weight, "D W", (x.shape[-1], W))
    obstacle = None
    if x.dtype == torch.float64:
        obstacle = "its Triton kernel does not compute in fp64"
    if W > MAX_WIDTH:
        obstacle = f"its Triton kernel sees at most {MAX_WIDTH} tokens: got {W}"
    if choose_backend(backend, x.device, "short_convolution", obstacle) == "triton":
        from kernels.fused.triton_convolution import short_convolution_triton

        return short_convolution_triton(x, weight, bias, cu_seqlens)
    y, _ = causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens)
    return F.silu(y)
