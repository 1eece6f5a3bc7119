"""Gated DeltaNet and Log-Linear Gated DeltaNet mixers.

    q, k, v = silu(conv([q_proj(u), k_proj(u), v_proj(u)]))
    q = l2norm(q) / sqrt(K);   k = l2norm(k)             (without / sqrt(K): scale_queries off)
    beta = sigmoid(b_proj(u));   log_decay = -exp(A_log) * softplus(a_proj(u) + dt_bias)
    o = log_linear_gated_delta_rule(q, k, v, log_decay, beta)
    o_proj(RMSNorm_V(o) * silu(g_proj(u)))

- Every head has its own key and query (G = H); V is usually 2 K.
- The convolution has no bias; the norm comes before the gate and spans one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.fused.norms import l2_norm
from kernels.linear_parents import gated_delta_rule
from kernels.log_linear_gated_delta import (
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
)
from models.config import ModelConfig
from models.layers import Linear, NormThenGate, ShortConvolution, at_least_fp32
from models.recurrent_mixer import RecurrentMixer

L2_NORM_EPS = 1e-6


class GatedDeltaNet(RecurrentMixer):
    """log_linear=True: Log-Linear Gated DeltaNet; False: Gated DeltaNet."""

    operator = staticmethod(log_linear_gated_delta_rule)
    linear_operator = staticmethod(gated_delta_rule)
    operator_step = staticmethod(log_linear_gated_delta_rule_step)

    def __init__(self, config: ModelConfig, log_linear: bool) -> None:
        sizes, D = config.gated_deltanet, config.d_model
        H, K, V = sizes.num_heads, sizes.key_size, sizes.value_size
        conv_sizes = (H * K, H * K, H * V)
        conv = ShortConvolution(sum(conv_sizes), sizes.conv_width, bias=False)
        super().__init__(config, (H, K, V), conv, log_linear)
        self.conv_sizes = conv_sizes
        self.query_scale = K**-0.5 if sizes.scale_queries else 1.0
        self.q_proj = Linear(D, H * K)
        self.k_proj = Linear(D, H * K)
        self.v_proj = Linear(D, H * V)
        self.a_proj = Linear(D, H)
        self.b_proj = Linear(D, H)
        self.g_proj = Linear(D, H * V)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.norm = NormThenGate(V, config.norm_eps)
        self.o_proj = Linear(H * V, D)

    def project(self, u: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        qkv = torch.cat([self.q_proj(u), self.k_proj(u), self.v_proj(u)], dim=-1)
        return qkv, (self.a_proj(u), self.b_proj(u), self.g_proj(u))

    def operands(self, x: Tensor, gates: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        a, b, _ = gates
        q, k, v = x.split(self.conv_sizes, dim=-1)
        q = l2_norm(q.unflatten(-1, (self.H, self.K)), L2_NORM_EPS, self.query_scale)
        k = l2_norm(k.unflatten(-1, (self.H, self.K)), L2_NORM_EPS, 1.0)
        v = v.unflatten(-1, (self.H, self.V))
        log_decay = -self.A_log.exp() * F.softplus(at_least_fp32(a) + self.dt_bias)
        beta = at_least_fp32(b).sigmoid()
        return q, k, v, log_decay, beta

    def output(self, o: Tensor, x: Tensor, gates: tuple[Tensor, ...]) -> Tensor:
        g = gates[2].unflatten(-1, (self.H, self.V))
        return self.o_proj(self.norm(o, g))

    @staticmethod
    def linear_step(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """S <- exp(g) S;  S <- S + k beta (v - k^T S)^T;  o = q^T S.

        q, k [B, H, K]; v [B, H, V]; log_decay, beta [B, H]; S [B, H, K, V].
        """
        q, k = at_least_fp32(q), at_least_fp32(k)
        S = log_decay.exp()[..., None, None] * S
        held = (k[..., None] * S).sum(-2)  # what the memory answers to k, [B, H, V]
        S = S + k[..., None] * (beta[..., None] * (v - held))[..., None, :]
        return (q[..., None] * S).sum(-2).to(v.dtype), S
