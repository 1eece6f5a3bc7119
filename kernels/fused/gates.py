"""What is computed from each number of a projection, or from the few numbers of a head.

    swiglu          silu(gate) * up
    level_softplus  softplus(P d + b) over the level axis of every head: lambda from its logits
    step_values     delta = softplus(dt + dt_bias);   v = delta * x;   g = -exp(A_log) * delta

All are computed in fp32 (fp64 for fp64). On a GPU each is one Triton kernel, elsewhere plain torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_shape
from kernels.dispatch import Backend, choose_backend

MAX_LEVELS = 64
"""Level weights of a head at most: a program holds their [W, W] matrix."""


def swiglu(gate: Tensor, up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """silu(gate) * up, both [..., F] of one dtype, which is the result's."""
    check_shape("up", up, " ".join("?" * gate.dim()), tuple(gate.shape))
    if choose_backend(backend, gate.device, "swiglu", _obstacle(gate)) == "triton":
        from kernels.fused.triton_gates import swiglu_triton

        return swiglu_triton(gate, up)
    return F.silu(gate) * up


def level_softplus(d: Tensor, P: Tensor, b: Tensor, *, backend: Backend = "auto") -> Tensor:
    """lambda = softplus(P d + b), fp32 (fp64 for fp64).

    Two linear layers over the levels are one: P = W2 W1.

    Args:
        d: [..., W], the projection of one head, any float dtype.
        P: [W, W], b: [W]; fp32.

    Returns:
        [..., W].
    """
    W = d.shape[-1]
    check_shape("P", P, "W W", (W, W))
    check_shape("b", b, "W", (W,))
    obstacle = _obstacle(d)
    if W > MAX_LEVELS:
        obstacle = f"its Triton kernel takes at most {MAX_LEVELS} levels: got {W}"
    if choose_backend(backend, d.device, "level_softplus", obstacle) == "triton":
        from kernels.fused.triton_gates import level_softplus_triton

        return level_softplus_triton(d, P, b)
    wide = torch.promote_types(d.dtype, torch.float32)
    with torch.autocast(d.device.type, enabled=False):
        return F.softplus(d.to(wide).contiguous() @ P.T + b)


def step_values(
    x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Mamba-2's step sizes, put into its values and decays.

    Args:
        x: [..., H, V].  dt: [..., H], any float dtype.  dt_bias, A_log: [H], fp32.

    Returns:
        v [..., H, V] in x's dtype and log_decay [..., H] in fp32 (fp64 for fp64).
    """
    check_shape("dt", dt, " ".join("?" * (x.dim() - 2)) + " H", tuple(x.shape[:-1]))
    if choose_backend(backend, x.device, "step_values", _obstacle(x)) == "triton":
        from kernels.fused.triton_gates import step_values_triton

        return step_values_triton(x, dt, dt_bias, A_log)
    delta = F.softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)) + dt_bias)
    return (delta[..., None] * x).to(x.dtype), -A_log.exp() * delta


def _obstacle(x: Tensor) -> str | None:
    return "its Triton kernel does not compute in fp64" if x.dtype == torch.float64 else None
