"""More levels for a trained model: old rows keep every bit, new levels start by rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.accounting import parameter_count
from models.config import MIXER_NAMES, ModelConfig
from models.extend_context import Rule, extend_parameters, extended_config
from models.initialize import initialize
from models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {"kind": "fixed"},
    "linear": {"kind": "linear"},
    "adaptive": {"kind": "adaptive"},
    "gelu": {"kind": "adaptive", "gelu": True},
}
LOG_LINEAR = [mixer for mixer in MIXER_NAMES if mixer.startswith("log_linear")]
OLD = 100


def extended(model: LanguageModel, max_seq_len: int, rule: Rule = "copy") -> LanguageModel:
    config = extended_config(model.config, max_seq_len, rule)
    longer = LanguageModel(config)
    parameters = extend_parameters(model.state_dict(), model.config, config, rule)
    longer.load_state_dict(parameters)
    assert parameter_count(config) == sum(p.numel() for p in longer.parameters())
    return longer


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rule", ["copy", "decay", "one", "tie"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixer", [*LOG_LINEAR, ("log_linear_mamba2", "attention")], ids=str)
@torch.no_grad()
def test_rows_of_the_old_length_keep_every_bit(
    mixer: Any, kind: str, rule: Rule, small_model: Build
) -> None:
    if (kind, rule) == ("linear", "decay"):
        pytest.skip("linear has no bias")
    model = small_model(mixer, max_seq_len=OLD, level_weights=KINDS[kind])
    longer = extended(model, 1000, rule)
    longest = extended(longer, 5000, rule)
    for T in (1, 2, 3, 63, 64, 65, OLD):
        expected = model(_tokens(2, T))
        assert torch.equal(longer(_tokens(2, T)), expected), T
        assert torch.equal(longest(_tokens(2, T)), expected), T
    assert torch.equal(longest(_tokens(2, 900)), longer(_tokens(2, 900)))
    packed, cu_seqlens = _tokens(1, 150), torch.tensor([0, 7, 90, 150])
    assert torch.equal(longer(packed, cu_seqlens), model(packed, cu_seqlens))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixer", LOG_LINEAR)
@torch.no_grad()
def test_decoding_of_the_old_length_keeps_every_bit(
    mixer: str, kind: str, small_model: Build
) -> None:
    model = small_model(mixer, max_seq_len=OLD, level_weights=KINDS[kind])
    longer, tokens = extended(model, 4000), _tokens(2, OLD)
    _, one = model.prefill(tokens[:, :59], model.empty_state(2))
    _, two = longer.prefill(tokens[:, :59], longer.empty_state(2))
    for t in range(59, OLD):
        logits, one = model.step(tokens[:, t], one)
        same, two = longer.step(tokens[:, t], two)
        assert torch.equal(logits, same), t


def _weights(model: LanguageModel, u: torch.Tensor) -> torch.Tensor:
    mixer = model.blocks[0].mixer
    return mixer._weights(mixer.level_weights, u)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_new_levels_start_by_rule(kind: str, small_model: Build) -> None:
    model = small_model("log_linear_mamba2", max_seq_len=OLD, level_weights=KINDS[kind])
    L = model.config.num_levels
    u = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    last = _weights(model, u)[..., -1:]
    for rule in ("copy", "tie"):
        new = _weights(extended(model, 8 * OLD, rule), u)[..., L:]
        assert new.shape[-1] == 3
        torch.testing.assert_close(new, last.expand_as(new))
    start = {"linear": 0.6931, "fixed": 1.0}.get(kind, F.softplus(torch.tensor(0.54)).item())
    new = _weights(extended(model, 8 * OLD, "one"), u)[..., L:]
    torch.testing.assert_close(new, torch.full_like(new, start), atol=1e-4, rtol=0)
    if kind != "linear":
        # At d_t = 0, where the content says nothing.
        zero, decayed = torch.zeros(1, 1, 32), extended(model, 8 * OLD, "decay")
        new = _weights(decayed, zero)[..., L:]
        halved = _weights(model, zero)[..., -1:] / 2.0 ** torch.arange(1, 4)
        torch.testing.assert_close(new, halved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_extended_model_trains_in_all_its_parts(kind: str, small_model: Build) -> None:
    model = small_model("log_linear_mamba2", max_seq_len=OLD, level_weights=KINDS[kind])
    longer, L = extended(model, 8 * OLD), model.config.num_levels
    longer(_tokens(1, 8 * OLD)).square().mean().backward()
    module = longer.blocks[0].mixer.level_weights
    if kind in ("fixed", "linear"):
        assert module.a.grad[:, L:].abs().min() > 0
        return
    assert module.b.grad[L:].abs().min() > 0
    old = model.blocks[0].mixer.level_weights.W1.shape[0]
    # Old weights may learn to read new numbers, and new hidden units: none is cut off.
    assert module.W1.grad[:old, L:].abs().max() > 0
    assert module.W2.grad[:L, old:].abs().max() > 0
    assert module.W2.grad[L:, old:].abs().max() > 0


def test_trained_coupling_of_old_and_new_weights_is_the_plain_mlp(small_model: Build) -> None:
    """With every entry in use, the blocks add up to W2 (W1 d) + b."""
    for kind in ("adaptive", "gelu"):
        model = small_model("log_linear_mamba2", max_seq_len=OLD, level_weights=KINDS[kind])
        longer = extended(extended(model, 2 * OLD), 8 * OLD)
        module = longer.blocks[0].mixer.level_weights
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(1))
        d = torch.randn(2, 3, 4, module.b.shape[0], generator=torch.Generator().manual_seed(2))
        hidden = d @ module.W1.T
        hidden = F.gelu(hidden) if kind == "gelu" else hidden
        expected = F.softplus(hidden @ module.W2.T + module.b)
        torch.testing.assert_close(module(d.flatten(-2), (2, 3)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixer", ["mamba2", "gated_deltanet", "attention"])
@torch.no_grad()
def test_mixers_without_levels_get_a_longer_limit_only(mixer: str, small_model: Build) -> None:
    model = small_model(mixer, max_seq_len=OLD)
    longer = extended(model, 4 * OLD)
    assert longer.config.level_weights == model.config.level_weights
    assert torch.equal(longer(_tokens(1, OLD)), model(_tokens(1, OLD)))
    assert longer(_tokens(1, 4 * OLD)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["softplus", "softmax"])
@torch.no_grad()
def test_tied_levels_share_one_weight_at_any_length(
    kind: str, activation: str, small_model: Build
) -> None:
    settings = {**KINDS[kind], "activation": activation, "tied_above": 3}
    model = small_model("log_linear_mamba2", max_seq_len=OLD, level_weights=settings)
    weights = _weights(model, torch.randn(2, 5, 32))
    assert weights.shape[-1] == model.config.num_levels == 8
    assert torch.equal(weights[..., 4:], weights[..., 4:5].expand(2, 5, 4, 4))
    assert not torch.equal(weights[..., 3], weights[..., 4])
    for name, parameter in model.named_parameters():
        if "level_weights.a" in name or "level_weights.b" in name:
            assert parameter.shape[-1] == 5
    longer = extended(model, 4000)
    assert [p.shape for p in longer.parameters()] == [p.shape for p in model.parameters()]
    assert torch.equal(longer(_tokens(1, OLD)), model(_tokens(1, OLD)))
    # A model that was built for the longer rows from the start is the same one.
    built = small_model("log_linear_mamba2", max_seq_len=4000, level_weights=settings)
    assert torch.equal(longer(_tokens(1, 300)), built(_tokens(1, 300)))


def test_tied_models_start_like_others(small_config: Callable[..., ModelConfig]) -> None:
    for kind in ("fixed", "adaptive"):
        tied = LanguageModel(
            small_config("log_linear_mamba2", level_weights={"kind": kind, "tied_above": 4})
        )
        untied = LanguageModel(small_config("log_linear_mamba2", level_weights={"kind": kind}))
        for model in (tied, untied):
            initialize(model, 0)
        torch.testing.assert_close(tied(_tokens(1, 200)), untied(_tokens(1, 200)))


@pytest.mark.parametrize(
    ("settings", "max_seq_len", "rule", "message"),
    [
        ({}, OLD, "copy", "must grow: got 100; expected more than the model's 100"),
        ({}, 2**21, "copy", "must be at most 1048576: got 2097152"),
        ({"activation": "softmax"}, 1000, "copy", "softmax over levels cannot be extended"),
        ({"kind": "linear"}, 1000, "decay", "rule decay needs a bias"),
    ],
)
def test_impossible_extensions_are_refused(
    settings: dict[str, Any],
    max_seq_len: int,
    rule: Rule,
    message: str,
    small_config: Callable[..., ModelConfig],
) -> None:
    config = small_config("log_linear_mamba2", max_seq_len=OLD, level_weights=settings)
    with pytest.raises(ValueError, match=message):
        extended_config(config, max_seq_len, rule)
