"""Attention's settings: window, grouped heads, QK-norm; and the cap on logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.accounting import forward_flops_per_token, parameter_count, state_bytes
from models.config import ModelConfig
from models.decoding_state import held_bytes
from models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
Config = Callable[..., ModelConfig]
T = 75


def _sizes(**settings: Any) -> dict[str, Any]:
    return {"num_heads": 4, "rope_theta": 10_000.0, **settings}


def _input(rows: int = 2) -> Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randn(rows, T, 32, generator=random, dtype=torch.float64)


def _expected(mixer: Any, u: Tensor, window: int, groups: int, qk_norm: bool) -> Tensor:
    H, size = 4, 8
    q, k, v = (
        (u @ p.weight.T).reshape(*u.shape[:2], -1, size)
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    if qk_norm:
        q, k = (
            x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
            for x, norm in ((q, mixer.q_norm), (k, mixer.k_norm))
        )
    angle = torch.arange(T).double()[:, None] * 10_000.0 ** (
        -torch.arange(0, size, 2).double() / size
    )
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    o = torch.zeros(*u.shape[:2], H, size, dtype=u.dtype)
    q, k = turned(q), turned(k)
    for t in range(T):
        past = slice(max(0, t - window + 1), t + 1)
        for h in range(H):
            g = h * groups // H
            score = (q[:, t, None, h] * k[:, past, g]).sum(-1) / size**0.5
            o[:, t, h] = (score.softmax(-1)[..., None] * v[:, past, g]).sum(1)
    return o.flatten(-2) @ mixer.o_proj.weight.T


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 16, 25, 74, 75, None])
def test_attention_equals_its_equations(
    window: int | None, groups: int, qk_norm: bool, small_model: Build
) -> None:
    sizes = _sizes(window=window, num_kv_heads=groups, qk_norm=qk_norm)
    mixer: Any = small_model("attention", attention=sizes, num_layers=1).double().blocks[0].mixer
    if qk_norm:
        with torch.no_grad():
            mixer.k_norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    expected = _expected(mixer, _input(), window or T, groups, qk_norm)
    torch.testing.assert_close(mixer(_input(), None, T), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [3, 16])
def test_windows_end_at_documents(window: int, small_model: Build) -> None:
    sizes = _sizes(window=window, num_kv_heads=2)
    mixer = small_model("attention", attention=sizes, num_layers=1).double().blocks[0].mixer
    u, cu_seqlens = _input(1), torch.tensor([0, 2, 40, T])
    packed = mixer(u, cu_seqlens, 38)
    for start, end in ((0, 2), (2, 40), (40, T)):
        alone = mixer(u[:, start:end], None, end - start)
        torch.testing.assert_close(packed[:, start:end], alone, rtol=1e-9, atol=1e-9)
    changed = u.clone()
    changed[:, 2:40] += 1
    assert torch.equal(mixer(changed, cu_seqlens, 38)[:, 40:], packed[:, 40:])


@pytest.mark.parametrize("window", [1, 5, 16, 64])
@torch.no_grad()
def test_pieces_and_steps_with_a_window_equal_the_full_forward(
    window: int, small_model: Build
) -> None:
    model = small_model("attention", attention=_sizes(window=window, num_kv_heads=2))
    tokens = torch.randint(50, (2, 150), generator=torch.Generator().manual_seed(0))
    full = model(tokens)
    state, read = model.empty_state(2), 0
    for piece in (3, 1, 40, 0, 1, 17, 1, 1):
        logits, state = model.prefill(tokens[:, read : read + piece], state)
        torch.testing.assert_close(logits, full[:, read : read + piece], rtol=1e-4, atol=1e-5)
        read += piece
        assert held_bytes(state) == 2 * state_bytes(model.config, read)
    for t in range(read, 150):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, full[:, t], rtol=1e-4, atol=1e-5)
        assert state.layers[0].capacity <= window


@torch.no_grad()
def test_full_cache_grows_seldom(small_model: Build) -> None:
    model = small_model("attention", max_seq_len=1000)
    state, capacities = model.empty_state(1), set()
    for _ in range(400):
        _, state = model.step(torch.zeros(1, dtype=torch.int64), state)
        capacities.add(state.layers[0].capacity)
    assert len(capacities) <= 6
    assert max(capacities) < 400 * 1.25 + 64


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_heads": 1},
        {"num_kv_heads": 2, "qk_norm": True},
        {"window": 10, "qk_norm": True},
    ],
)
def test_counts_know_the_settings(settings: dict[str, Any], small_config: Config) -> None:
    config = small_config("attention", attention=_sizes(**settings))
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in LanguageModel(config).parameters())
    assert parameter_count(config) == built
    visible = sum(min(t + 1, settings.get("window", 50)) for t in range(50)) / 50
    plain = small_config("attention", attention=_sizes(num_kv_heads=settings.get("num_kv_heads")))
    full = sum(t + 1 for t in range(50)) / 50
    difference = forward_flops_per_token(plain, 50) - forward_flops_per_token(config, 50)
    assert difference == pytest.approx(2 * 4 * 32 * (full - visible))


def test_window_makes_kv_bytes_constant(small_config: Config) -> None:
    windowed = small_config("attention", attention=_sizes(window=10, num_kv_heads=2))
    assert state_bytes(windowed, 10) == state_bytes(windowed, 250) == 2 * 2 * 10 * 16 * 4
    assert state_bytes(small_config("attention", attention=_sizes()), 250) == 2 * 2 * 250 * 32 * 4


@pytest.mark.parametrize("mixer", ["mamba2", "attention"])
def test_logit_soft_cap_bounds_logits_smoothly(mixer: str, small_model: Build) -> None:
    tokens = torch.arange(20)[None]
    plain, capped = small_model(mixer)(tokens), small_model(mixer, logit_soft_cap=0.7)(tokens)
    torch.testing.assert_close(capped, 0.7 * torch.tanh(plain / 0.7))
    assert capped.abs().max() < 0.7 < plain.abs().max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": {"num_heads": 4, "num_kv_heads": 3}}, "num_kv_heads=3 does not divide .*=4"),
        ({"attention": {"num_heads": 4, "window": 0}}, "window"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap"),
        ({"level_weights": {"tied_above": 8}}, "ties nothing: max_seq_len=256 has levels 0 to 8"),
        ({"level_weights": {"tied_above": -1}}, "tied_above"),
        ({"level_weights": {"grown_from": [4, 4]}}, "grown_from must rise from 1 .* the 9 weights"),
        ({"level_weights": {"grown_from": [9]}}, r"grown_from must rise .*: got \[9\]"),
    ],
)
def test_wrong_settings_are_refused(
    fields: dict[str, Any], message: str, small_config: Config
) -> None:
    with pytest.raises(ValueError, match=message):
        small_config("attention", **fields)


def test_soft_cap_and_norms_get_gradients(small_model: Build) -> None:
    sizes = _sizes(qk_norm=True, window=7, num_kv_heads=2)
    model = small_model("attention", attention=sizes, logit_soft_cap=2.0)
    F.cross_entropy(model(torch.arange(40)[None])[0], torch.arange(40)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
