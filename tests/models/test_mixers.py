"""Each block against its published equations, written out naively."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.levels import level
from models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
T = 21


def _input(model: LanguageModel) -> Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randn(2, T, model.config.d_model, generator=random, dtype=torch.float64)


def _mixer(small_model: Build, name: str, **fields: object) -> tuple[torch.nn.Module, Tensor]:
    model = small_model(name, num_layers=1, **fields).double()
    return model.blocks[0].mixer, _input(model)


def _silu_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x).clone()
    width = weight.shape[1]
    for t in range(T):
        for tap in range(width):
            if (source := t - (width - 1) + tap) >= 0:
                y[:, t] += weight[:, tap] * x[:, source]
    return y * y.sigmoid()


def _lambda(mixer: torch.nn.Module, u: Tensor, heads: int) -> Tensor:
    """[B, H, T, T]: the adaptive weight of s as read by t."""
    parameters = mixer.level_weights
    d = (u @ mixer.level_proj.weight.T).view(2, T, heads, -1)
    by_level = F.softplus((d @ parameters.W1.T) @ parameters.W2.T + parameters.b)
    mask = torch.zeros(2, heads, T, T, dtype=u.dtype)
    for t in range(T):
        for s in range(t + 1):
            mask[:, :, t, s] = by_level[:, t, :, level(t, s)]
    return mask


@pytest.mark.parametrize("name", ["mamba2", "log_linear_mamba2"])
def test_mamba2_equals_its_equations(name: str, small_model: Build) -> None:
    mixer, u = _mixer(small_model, name)
    H, V, G, K = 4, 16, 2, 32
    inner = H * V
    projected = u @ mixer.in_proj.weight.T
    z, xBC, dt = projected.split([inner, inner + 2 * G * K, H], dim=-1)
    xBC = _silu_convolution(xBC, mixer.conv.weight, mixer.conv.bias)
    x, B, C = xBC.split([inner, G * K, G * K], dim=-1)
    x = x.reshape(2, T, H, V)
    B = B.reshape(2, T, G, K).repeat_interleave(H // G, dim=2)
    C = C.reshape(2, T, G, K).repeat_interleave(H // G, dim=2)
    delta = torch.log1p(torch.exp(dt + mixer.dt_bias))
    A = -torch.exp(mixer.A_log)
    weights = _lambda(mixer, u, H) if name.startswith("log_linear") else torch.ones(2, H, T, T)
    y = torch.zeros(2, T, H, V, dtype=torch.float64)
    for t in range(T):
        for s in range(t + 1):
            decay = torch.exp((A * delta[:, s + 1 : t + 1]).sum(1))
            match = (C[:, t] * B[:, s]).sum(-1) * decay * weights[:, :, t, s]
            y[:, t] += match[..., None] * delta[:, s, :, None] * x[:, s]
    y = (y + mixer.D[:, None] * x).reshape(2, T, inner) * (z * z.sigmoid())
    y = y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5) * mixer.norm.weight
    expected = y @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(u, None, T), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gated_deltanet", "log_linear_gated_deltanet"])
def test_gated_deltanet_equals_its_equations(name: str, small_model: Build) -> None:
    mixer, u = _mixer(small_model, name)
    H, K, V = 2, 16, 32
    qkv = [u @ p.weight.T for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)]
    taps = mixer.conv.weight.split([H * K, H * K, H * V])
    q, k, v = (
        _silu_convolution(x, w, None).reshape(2, T, H, -1) for x, w in zip(qkv, taps, strict=True)
    )
    q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6) / K**0.5
    k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    beta = torch.sigmoid(u @ mixer.b_proj.weight.T)
    rate = torch.log1p(torch.exp(u @ mixer.a_proj.weight.T + mixer.dt_bias))
    alpha = torch.exp(-torch.exp(mixer.A_log) * rate)
    weights = _lambda(mixer, u, H) if name.startswith("log_linear") else torch.ones(2, H, T, T)
    o = torch.zeros(2, T, H, V, dtype=torch.float64)
    for s in range(T):  # what token s inserted, followed through the transitions of later tokens
        S = beta[:, s, :, None, None] * k[:, s, :, :, None] * v[:, s, :, None, :]
        for t in range(s, T):
            if t > s:
                held = (k[:, t, :, :, None] * S).sum(2, keepdim=True)
                S = S - beta[:, t, :, None, None] * k[:, t, :, :, None] * held
                S = alpha[:, t, :, None, None] * S
            o[:, t] += weights[:, :, t, s, None] * (q[:, t, :, :, None] * S).sum(2)
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * mixer.norm.weight
    g = (u @ mixer.g_proj.weight.T).reshape(2, T, H, V)
    expected = (o * g * g.sigmoid()).reshape(2, T, H * V) @ mixer.o_proj.weight.T
    torch.testing.assert_close(mixer(u, None, T), expected, rtol=1e-9, atol=1e-9)


def test_attention_equals_its_equations(small_model: Build) -> None:
    mixer, u = _mixer(small_model, "attention")
    H, size = 2, 16
    q, k, v = (
        (u @ p.weight.T).reshape(2, T, H, size) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
        angle = torch.arange(T).double()[:, None] * 10_000.0 ** (
            -torch.arange(0, size, 2).double() / size
        )
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)[None, :, None]
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    score = torch.einsum("bthd,bshd->bhts", turned(q), turned(k)) / size**0.5
    score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    o = torch.einsum("bhts,bshd->bthd", score.softmax(-1), v).reshape(2, T, -1)
    torch.testing.assert_close(mixer(u, None, T), o @ mixer.o_proj.weight.T, rtol=1e-9, atol=1e-9)


def test_rotary_positions_restart_in_every_document(small_model: Build) -> None:
    mixer, u = _mixer(small_model, "attention")
    document = u[:1, :7]
    packed = torch.cat([u[:1, 7:16], document], dim=1)
    out = mixer(packed, torch.tensor([0, 9, 16]), 9)[:, 9:]
    torch.testing.assert_close(out, mixer(document, None, 7), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet"])
def test_gates_stay_fp32_under_autocast(name: str, small_model: Build) -> None:
    mixer = small_model(f"log_linear_{name}", num_layers=1).blocks[0].mixer
    u = torch.randn(1, 5, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, gates = mixer.project(u)
        q, k, v, *scalars = mixer.operands(x, gates)
        level_weights = mixer.level_weights(mixer.level_proj(u), u.shape[:-1])
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
    assert {x.dtype for x in (*scalars, level_weights)} == {torch.float32}
