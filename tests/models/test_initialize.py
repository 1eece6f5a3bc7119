"""Starting values."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.config import MIXER_NAMES, ModelConfig
from models.initialize import initialize
from models.language_model import LanguageModel

Config = Callable[..., ModelConfig]
LOG_LINEAR = pytest.mark.parametrize("mixer", ["log_linear_mamba2", "log_linear_gated_deltanet"])


def _initialized(config: ModelConfig, seed: int = 0) -> LanguageModel:
    model = LanguageModel(config)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)  # what is not initialised must show
    initialize(model, seed)
    return model


def _level_weights(model: LanguageModel) -> torch.Tensor:
    mixer: Any = model.blocks[0].mixer
    u = torch.randn(2, 7, model.config.d_model)
    d = None if mixer.level_proj is None else mixer.level_proj(u)
    return mixer.level_weights(d, (2, 7))


@pytest.mark.parametrize("mixer", MIXER_NAMES)
@pytest.mark.parametrize("kind", ["fixed", "linear", "adaptive"])
def test_every_parameter_is_initialized(mixer: str, kind: str, small_config: Config) -> None:
    model = _initialized(small_config(mixer, level_weights={"kind": kind}))
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name


@LOG_LINEAR
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_lambda_starts_at_one_on_every_level(mixer: str, kind: str, small_config: Config) -> None:
    model = _initialized(small_config(mixer, level_weights={"kind": kind}))
    assert (_level_weights(model) - 1).abs().max() < 1e-3


@LOG_LINEAR
def test_adaptive_bias_and_output_matrix_are_not_overwritten(
    mixer: str, small_config: Config
) -> None:
    model = _initialized(small_config(mixer))
    for block in model.blocks:
        parameters: Any = block.mixer.level_weights
        assert torch.equal(parameters.b, torch.full_like(parameters.b, 0.54))
        assert torch.equal(parameters.W2, torch.zeros_like(parameters.W2))
        assert parameters.W1.std() > 0.1


@LOG_LINEAR
def test_linear_lambda_starts_with_a_one(mixer: str, small_config: Config) -> None:
    model = _initialized(small_config(mixer, level_weights={"kind": "linear"}, init_std=1e-4))
    parameters: Any = model.blocks[0].mixer.level_weights
    assert torch.equal(parameters.a, torch.ones_like(parameters.a))
    assert (_level_weights(model) - math.log(2)).abs().max() < 1e-2


def test_projections_have_the_configured_deviation(small_config: Config) -> None:
    config = small_config("mamba2", d_model=256, init_std=0.01, rescale_residual_init=False)
    model = _initialized(config)
    for name in ("blocks.0.mixer.in_proj", "blocks.1.mixer.out_proj", "embedding", "lm_head"):
        assert abs(model.get_parameter(f"{name}.weight").std() / 0.01 - 1) < 0.05, name
    model = _initialized(config.model_copy(update={"rescale_residual_init": True}))
    for name in ("blocks.1.mixer.out_proj", "blocks.0.mlp.down_proj"):  # 2 layers x (mixer, MLP)
        assert abs(model.get_parameter(f"{name}.weight").std() / 0.005 - 1) < 0.05, name
    assert abs(model.get_parameter("blocks.0.mixer.in_proj.weight").std() / 0.01 - 1) < 0.05


def test_decay_starts_as_published(small_config: Config) -> None:
    mamba2: Any = _initialized(small_config("mamba2", d_model=512)).blocks[0].mixer
    torch.testing.assert_close(mamba2.A_log.exp(), torch.arange(1.0, 65.0))
    assert torch.equal(mamba2.D, torch.ones(64))
    delta_net: Any = (
        _initialized(
            small_config(
                "gated_deltanet",
                gated_deltanet={"num_heads": 64, "key_size": 16, "value_size": 16},
            )
        )
        .blocks[0]
        .mixer
    )
    A = delta_net.A_log.exp()
    assert A.min() >= 1e-4
    assert A.max() <= 16.001
    assert 6 < A.mean() < 10
    for mixer in (mamba2, delta_net):
        delta = torch.nn.functional.softplus(mixer.dt_bias)
        assert delta.min() >= 0.999e-3
        assert delta.max() <= 0.1001
        assert 0.006 < delta.log().mean().exp() < 0.016  # log-uniform: geometric mean 0.01


def test_shared_parameters_depend_on_seed_and_name_alone(small_config: Config) -> None:
    one = dict(_initialized(small_config("log_linear_mamba2"), seed=1).named_parameters())
    parent = _initialized(small_config("mamba2"), seed=1)
    for name, parameter in parent.named_parameters():
        assert torch.equal(parameter, one[name]), name
    other = _initialized(small_config("mamba2"), seed=2)
    assert not torch.equal(other.embedding.weight, parent.embedding.weight)
    in_proj = [block.mixer.in_proj.weight for block in parent.blocks]
    assert not torch.equal(in_proj[0], in_proj[1])


def test_parameter_without_rule_is_refused(small_config: Config) -> None:
    model = LanguageModel(small_config("mamba2"))
    model.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="no starting value for parameter extra"):
        initialize(model, 0)
