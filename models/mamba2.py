"""Mamba-2 and Log-Linear Mamba-2 mixers.

    [z | x k q | dt] = in_proj(u);   x, k, q = silu(conv(...));   Delta = softplus(dt + dt_bias)
    o = log_linear_ssd(q, k, v = Delta * x, log_decay = -exp(A_log) * Delta)
    out_proj(RMSNorm((o + D * x) * silu(z)))

- From the state-space side: q = C, k = B, v = Delta * x, log_decay = A * Delta.
- G key/query pairs serve H value heads (G = 1 in the published models); q and k are neither
  normalised nor scaled.
- The convolution has a bias; the norm comes after the gate and spans all heads.
"""

import torch
from torch import Tensor, nn

from kernels.fused.gates import step_values
from kernels.linear_parents import linear_ssd
from kernels.log_linear_ssd import (
    log_linear_ssd,
    log_linear_ssd_step,
    log_linear_ssd_step_in_place,
    steps_in_place,
)
from models.config import ModelConfig
from models.layers import GateThenNorm, Linear, ShortConvolution, at_least_fp32
from models.recurrent_mixer import RecurrentMixer


class Mamba2(RecurrentMixer):
    """log_linear=True: Log-Linear Mamba-2; False: Mamba-2."""

    operator = staticmethod(log_linear_ssd)
    linear_operator = staticmethod(linear_ssd)
    operator_step = staticmethod(log_linear_ssd_step)
    operator_step_in_place = staticmethod(log_linear_ssd_step_in_place)

    def __init__(self, config: ModelConfig, log_linear: bool) -> None:
        sizes, inner = config.mamba2, config.mamba2_inner_size
        H, G, K = config.mamba2_num_heads, sizes.num_groups, sizes.state_size
        channels = inner + 2 * G * K
        conv = ShortConvolution(channels, sizes.conv_width, bias=True)
        super().__init__(config, (H, K, sizes.head_size), conv, log_linear)
        self.G = G
        self.in_sizes = (inner, channels, H)
        self.conv_sizes = (inner, G * K, G * K)
        self.in_proj = Linear(config.d_model, sum(self.in_sizes))
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.D = nn.Parameter(torch.empty(H))
        self.norm = GateThenNorm(inner, config.norm_eps)
        self.out_proj = Linear(inner, config.d_model)

    def steps_in_place(self, device: torch.device, dtype: torch.dtype) -> bool:
        log_linear = self.level_weights is not None
        return log_linear and steps_in_place(self.K, self.V, self.L, dtype, device)

    def project(self, u: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        z, xkq, dt = self.in_proj(u).split(self.in_sizes, dim=-1)
        return xkq, (z, dt)

    def operands(self, x: Tensor, gates: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        _, dt = gates
        x, k, q = x.split(self.conv_sizes, dim=-1)
        x = x.unflatten(-1, (self.H, self.V))
        k = k.unflatten(-1, (self.G, self.K))
        q = q.unflatten(-1, (self.G, self.K))
        v, log_decay = step_values(x, dt, self.dt_bias, self.A_log)
        return q, k, v, log_decay

    def output(self, o: Tensor, x: Tensor, gates: tuple[Tensor, ...]) -> Tensor:
        z, _ = gates
        x = x[..., : self.conv_sizes[0]].unflatten(-1, (self.H, self.V))
        z = z.unflatten(-1, (self.H, self.V))
        return self.out_proj(self.norm(o, z, (x, self.D)))

    @staticmethod
    def linear_step(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """S <- exp(g) S + k v^T;  o = q^T S.

        q, k [B, G, K]; v [B, H, V]; log_decay [B, H]; S [B, H, K, V].
        """
        heads_per_group = v.shape[1] // q.shape[1]
        q = at_least_fp32(q).repeat_interleave(heads_per_group, 1)
        k = at_least_fp32(k).repeat_interleave(heads_per_group, 1)
        S = log_decay.exp()[..., None, None] * S + k[..., None] * v[..., None, :]
        return (q[..., None] * S).sum(-2).to(v.dtype), S
