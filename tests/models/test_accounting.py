"""Formulas against models."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.accounting import (
    flops_per_token,
    forward_flops_per_token,
    mean_past_levels,
    parameter_count,
    state_bytes,
)
from models.config import MIXER_NAMES, PRESETS, ModelConfig
from models.decoding_state import held_bytes
from models.language_model import LanguageModel

Config = Callable[..., ModelConfig]


def _built_count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(config).parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_formula_equals_the_model(preset: str) -> None:
    assert parameter_count(PRESETS[preset]) == _built_count(PRESETS[preset])


@pytest.mark.parametrize("kind", ["fixed", "linear", "adaptive"])
@pytest.mark.parametrize("mixer", [*MIXER_NAMES, ("attention", "mamba2")], ids=str)
def test_parameter_formula_knows_every_variant(mixer: Any, kind: str, small_config: Config) -> None:
    for fields in ({"tie_embeddings": True}, {"mlp": {"hidden_size": 0}}):
        config = small_config(mixer, level_weights={"kind": kind}, **fields)
        assert parameter_count(config) == _built_count(config)


@pytest.mark.parametrize(
    ("preset", "published_millions"),
    [
        ("0.8b-mamba2", 802),
        ("0.8b-log-linear-mamba2", 825),
        ("0.8b-gated-deltanet", 793),
        ("0.8b-log-linear-gated-deltanet", 796),
        ("0.8b-attention", 693),
        ("0.8b-attention-24-layers", 778),
    ],
)
def test_paper_presets_have_the_published_size(preset: str, published_millions: int) -> None:
    """With a SwiGLU width of 4096 = 8/3 of d_model, the only size that the paper does not print."""
    assert PRESETS[preset].mlp.hidden_size == 4096
    assert abs(parameter_count(PRESETS[preset]) / 1e6 / published_millions - 1) < 0.01


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("125m")])
def test_125m_presets_are_about_that_size(preset: str) -> None:
    assert 105e6 < parameter_count(PRESETS[preset]) < 135e6


@pytest.mark.parametrize("mixer", ["mamba2", "gated_deltanet"])
def test_adaptive_lambda_adds_less_than_a_ten_thousandth(mixer: str) -> None:
    preset = PRESETS[f"0.8b-log-linear-{mixer.replace('_', '-')}"]
    with torch.device("meta"):
        model = LanguageModel(preset)
    added = sum(p.numel() for n, p in model.named_parameters() if "level_weights." in n)
    assert 0 < added < 1e-4 * parameter_count(preset)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 64, 100, 1000])
def test_mean_past_levels_counts_the_ones_of_positions(seq_len: int) -> None:
    expected = sum(t.bit_count() for t in range(seq_len)) / seq_len
    assert math.isclose(mean_past_levels(seq_len), expected)


def test_softmax_flops_equal_counted_flops(small_config: Config) -> None:
    model = LanguageModel(small_config("attention"))
    T = 64
    # The other kernels on a CPU escape the counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, T, dtype=torch.int64))
    # The counter takes the whole T x T square of scores, a causal model needs T (T + 1) / 2 of it.
    config = model.config
    square = 4 * config.d_model * T * T * config.num_layers
    expected = counter.get_total_flops() - square * (1 - (T + 1) / (2 * T))
    assert math.isclose(forward_flops_per_token(config, T) * T, expected, rel_tol=1e-6)


@pytest.mark.parametrize("mixer", ["mamba2", "gated_deltanet"])
def test_projection_flops_of_recurrent_models_equal_counted_flops(
    mixer: str, small_config: Config
) -> None:
    for name in (mixer, f"log_linear_{mixer}"):
        model = LanguageModel(small_config(name, level_weights={"kind": "linear"}))
        with FlopCounterMode(display=False) as counter:
            projections = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
            for projection in projections:
                projection(torch.zeros(1, projection.in_features))
        operators = forward_flops_per_token(model.config, 1) - counter.get_total_flops()
        H, K, V, channels = (4, 32, 16, 192) if mixer == "mamba2" else (2, 16, 32, 128)
        # At position 0 the log-linear models insert and read their own token only.
        linear = H * K * V * (4 if mixer == "mamba2" else 6)
        own = H * (2 * K * V + 2 * (K + V))
        expected = 2 * (2 * channels * 4 + (linear if name == mixer else own))
        assert operators == expected, name


def test_work_grows_with_log_t_in_log_linear_models_and_with_t_in_softmax(
    small_config: Config,
) -> None:
    def growth(mixer: str, start: int) -> float:
        config = small_config(mixer)
        return flops_per_token(config, 2 * start) - flops_per_token(config, start)

    for mixer in ("mamba2", "gated_deltanet"):
        assert growth(mixer, 1024) == 0
        doubling = growth(f"log_linear_{mixer}", 1024)
        assert doubling > 0
        assert math.isclose(growth(f"log_linear_{mixer}", 65_536), doubling, rel_tol=1e-6)
    assert math.isclose(growth("attention", 65_536), 64 * growth("attention", 1024))


def test_backward_is_twice_the_forward(small_config: Config) -> None:
    config = small_config("log_linear_mamba2")
    assert flops_per_token(config, 100) == 3 * forward_flops_per_token(config, 100)


@pytest.mark.parametrize("mixer", MIXER_NAMES)
def test_state_bytes_equal_the_state(mixer: str, small_config: Config) -> None:
    config = small_config(mixer, max_seq_len=100)
    model = LanguageModel(config)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        _, state = model.prefill(torch.zeros(1, 100, dtype=torch.int64), model.empty_state(1))
    assert state_bytes(config, 100) == held_bytes(state)
