"""The operators that `python -m kernels bench` times side by side, ours and installed peers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.levels import num_levels
from kernels.log_linear_gated_delta import log_linear_gated_delta_rule
from kernels.log_linear_ssd import log_linear_ssd

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of one measurement; the letters of kernels/README.md."""

    B: int
    T: int
    G: int
    H: int
    K: int
    V: int
    dtype: torch.dtype
    device: torch.device

    @property
    def flops(self) -> tuple[float, float]:
        """Products of log_linear_ssd forward and backward, with chunks of C = 128 and q k^T, dq,
        dk made once for a group (kernels/README.md); a is the mean number of nodes a chunk reads.

            forward   2 C K G/H + 2 C V + 2 K V (1 + a)      a token and head
            backward  6 C K G/H + 4 C V + 2 K V (3 + 2 a)
        """
        C, K, V = 128, self.K, self.V
        chunks = -(-self.T // C)
        a = sum(c.bit_count() for c in range(chunks)) / chunks
        shared = self.G / self.H
        tokens = self.B * self.T * self.H
        forward = 2 * C * K * shared + 2 * C * V + 2 * K * V * (1 + a)
        backward = 6 * C * K * shared + 4 * C * V + 2 * K * V * (3 + 2 * a)
        return tokens * forward, tokens * backward

    @property
    def gated_delta_flops(self) -> tuple[float, float]:
        """The same of log_linear_gated_delta_rule, every product of its kernels counted once, with
        chunks of C = 64 (kernels/log_linear_gated_delta/triton_*.py); a is the mean number of nodes
        a chunk reads, b of those a farther one follows, m of merges a chunk.

            forward   C (8 K + 2 V + 10 C) + 2 K (K + V) (1 + m K / C) + 2 K (V a + K b)
            backward  C (20 K + 4 V + 4 C) + 4 K (K + V) (1 + m K / C) + 2 K (2 V a + 3 K b)
        """
        C, K, V = 64, self.K, self.V
        last = -(-self.T // C) - 1
        a = sum(c.bit_count() for c in range(last + 1)) / (last + 1)
        b = sum(max(c.bit_count() - 1, 0) for c in range(last + 1)) / (last + 1)
        m = sum(e + (e & -e) <= last for e in range(1, last + 1)) / (last + 1)
        tree = K * (K + V) * (1 + m * K / C)
        tokens = self.B * self.T * self.H
        forward = C * (8 * K + 2 * V + 10 * C) + 2 * tree + 2 * K * (V * a + K * b)
        backward = C * (20 * K + 4 * V + 4 * C) + 4 * tree + 2 * K * (2 * V * a + 3 * K * b)
        return tokens * forward, tokens * backward


@dataclass(frozen=True)
class Case:
    """One operator on one set of inputs: `run` is differentiable in `inputs`."""

    run: Run
    inputs: Sequence[Tensor]


def ssd_inputs(s: Sizes) -> dict[str, Tensor]:
    """Random inputs of log_linear_ssd as a trained model has them: weak decay, positive lambda."""
    random = torch.Generator(s.device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device=s.device)

    rate = torch.exp(torch.rand(s.H, generator=random, device=s.device))
    return {
        "q": (randn(s.B, s.T, s.G, s.K) * s.K**-0.5).to(s.dtype),
        "k": randn(s.B, s.T, s.G, s.K).to(s.dtype),
        "v": randn(s.B, s.T, s.H, s.V).to(s.dtype),
        "log_decay": -rate * F.softplus(randn(s.B, s.T, s.H) - 4),
        "level_weights": F.softplus(randn(s.B, s.T, s.H, num_levels(s.T))).to(s.dtype),
    }


def gated_delta_inputs(s: Sizes) -> dict[str, Tensor]:
    """The same for log_linear_gated_delta_rule: normalised keys, beta, q and k of every head."""
    inputs = ssd_inputs(s)
    for name in ("q", "k"):
        inputs[name] = F.normalize(inputs[name].float(), dim=-1).to(s.dtype)
    random = torch.Generator(s.device).manual_seed(1)
    beta = torch.rand(s.B, s.T, s.H, generator=random, device=s.device)
    return {**inputs, "beta": beta}


def fenwick(op: str, s: Sizes, **options: Tensor) -> Case:
    """Ours, as a model calls it."""
    x = ssd_inputs(s) if op == "ssd" else gated_delta_inputs(s)
    operator: Callable[..., tuple[Tensor, object]] = (
        log_linear_ssd if op == "ssd" else log_linear_gated_delta_rule
    )
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    return Case(lambda: operator(**leaves, **options)[0], list(leaves.values()))


def fenwick_packed(op: str, s: Sizes) -> Case:
    """Ours on the same tokens as one row of unequal documents, some of them short, none aligned."""
    tokens = s.B * s.T
    shares = torch.tensor([1, 7, 3, 12, 2, 20, 5, 14, 9, 27], dtype=torch.float64)
    ends = (torch.cumsum(shares, 0) / shares.sum() * (tokens - 1)).long() | 1
    ends[-1] = tokens
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).unique()
    return fenwick(op, replace(s, B=1, T=tokens), cu_seqlens=cu_seqlens)


def fenwick_odd(op: str, s: Sizes) -> Case:
    """Ours on rows one token shorter: their last chunk is not full."""
    return fenwick(op, replace(s, T=max(1, s.T - 1)))


def sdpa(op: str, s: Sizes) -> Case:
    """Causal softmax attention as wide as v, by torch's best backend for it (cuDNN): H heads of
    size V beside `ssd`; heads of 64, as attention models of that width have, beside
    `gated_delta`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = s.V if op == "ssd" or s.H * s.V % 64 else 64
    q, k, v = (
        torch.randn(
            s.B, s.H * s.V // size, s.T, size, device=s.device, dtype=s.dtype, requires_grad=True
        )
        for _ in range(3)
    )
    on_gpu = s.device.type == "cuda"
    backends = [SDPBackend.CUDNN_ATTENTION] if on_gpu else [SDPBackend.MATH]

    def run() -> Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Case(run, [q, k, v])


def mamba_ssm(op: str, s: Sizes) -> Case:
    """Mamba-2's own SSD, the linear parent of `ssd`: its chunk scan with dt folded away."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x = ssd_inputs(s)
    v, dt = x["v"].requires_grad_(), -x["log_decay"].requires_grad_()
    A = torch.full((s.H,), -1.0, device=s.device)
    q, k = x["q"].requires_grad_(), x["k"].requires_grad_()

    def run() -> Tensor:
        o: Tensor = mamba_chunk_scan_combined(v, dt, A, k, q, chunk_size=256)
        return o

    return Case(run, [q, k, v, x["log_decay"]])


def fla(op: str, s: Sizes) -> Case:
    """FLA's log-linear attention for `ssd`, its linear gated delta rule for `gated_delta`."""
    x = {
        name: value.requires_grad_()
        for name, value in (ssd_inputs(s) if op == "ssd" else gated_delta_inputs(s)).items()
    }
    if op == "ssd":
        from fla.ops.log_linear_attn import chunk_log_linear_attn

        return Case(
            lambda: chunk_log_linear_attn(
                x["q"], x["k"], x["v"], x["log_decay"], x["level_weights"]
            )[0],
            list(x.values()),
        )
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    names = ("q", "k", "v", "log_decay", "beta")
    leaves = [x[name] for name in names]
    return Case(lambda: chunk_gated_delta_rule(*leaves)[0], leaves)


PEERS: dict[str, Callable[[str, Sizes], Case]] = {
    "fenwick": fenwick,
    "fenwick_packed": fenwick_packed,
    "fenwick_odd": fenwick_odd,
    "mamba_ssm": mamba_ssm,
    "fla": fla,
    "sdpa": sdpa,
}
CAPTURABLE = frozenset(PEERS) - {"mamba_ssm", "fla"}
"""Those that a CUDA graph can hold; a capture that fails leaves a process that cannot go on."""
