"""Lambda's three kinds and two activations."""

import pytest
import torch
import torch.nn.functional as F

from models.config import LevelWeightsConfig
from models.level_weights import LevelWeights

B, T, H, L = 2, 3, 4, 5


def _module(**settings: object) -> LevelWeights:
    module = LevelWeights(LevelWeightsConfig.model_validate(settings), H, L)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=random)
    return module


def _projected() -> torch.Tensor:
    return torch.randn(B, T, H * L, generator=torch.Generator().manual_seed(1))


def test_fixed_is_a_constant_per_head_and_level() -> None:
    module = _module(kind="fixed")
    assert not module.reads_input
    expected = F.softplus(module.a).expand(B, T, H, L)
    torch.testing.assert_close(module(None, (B, T)), expected)


def test_linear_scales_the_projection() -> None:
    module, d = _module(kind="linear"), _projected()
    expected = F.softplus(module.a * d.view(B, T, H, L))
    torch.testing.assert_close(module(d, (B, T)), expected)


def test_linear_with_an_offset_starts_at_one() -> None:
    module, d = _module(kind="linear", offset=0.5413248546), _projected()
    expected = F.softplus(module.a * d.view(B, T, H, L) + 0.5413248546)
    torch.testing.assert_close(module(d, (B, T)), expected)
    torch.testing.assert_close(module(torch.zeros_like(d), (B, T)), torch.ones(B, T, H, L))


@pytest.mark.parametrize("gelu", [False, True])
def test_adaptive_is_an_mlp_over_levels_shared_by_heads(gelu: bool) -> None:
    module, d = _module(kind="adaptive", gelu=gelu), _projected()
    assert module.W1.shape == (2 * L, L)
    for h in range(H):
        hidden = F.linear(d.view(B, T, H, L)[:, :, h], module.W1)
        hidden = F.gelu(hidden) if gelu else hidden
        expected = F.softplus(F.linear(hidden, module.W2, module.b))
        torch.testing.assert_close(module(d, (B, T))[:, :, h], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["fixed", "linear", "adaptive"])
def test_softmax_sums_to_one_over_levels(kind: str) -> None:
    module = _module(kind=kind, activation="softmax")
    weights = module(None if kind == "fixed" else _projected(), (B, T))
    assert weights.shape == (B, T, H, L)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, T, H))


def test_products_stay_fp32_under_autocast() -> None:
    module, d = _module(kind="adaptive"), _projected()
    expected = module(d, (B, T))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = module(d, (B, T))
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected)
