"""ModelConfig: what it refuses and what it derives."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from models.config import PRESETS, ModelConfig

Config = Callable[..., ModelConfig]


@pytest.mark.parametrize("preset", PRESETS)
def test_config_survives_json(preset: str) -> None:
    config = PRESETS[preset]
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config


def test_hybrid_survives_json(small_config: Config) -> None:
    config = small_config(["mamba2", "attention"])
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config


def test_there_is_a_preset_of_every_size_and_mixer() -> None:
    for size in ("tiny", "125m", "0.8b"):
        mixers = {config.mixer for name, config in PRESETS.items() if name.startswith(size)}
        assert len(mixers) == 5


def test_paper_presets_have_the_published_shape() -> None:
    mamba2 = PRESETS["0.8b-log-linear-mamba2"]
    assert (mamba2.d_model, mamba2.num_layers, mamba2.vocab_size) == (1536, 21, 32_000)
    assert (mamba2.mamba2_num_heads, mamba2.mamba2.head_size, mamba2.mamba2.state_size) == (
        48,
        64,
        128,
    )
    assert (mamba2.mamba2.num_groups, mamba2.mamba2.expand) == (1, 2)
    delta = PRESETS["0.8b-log-linear-gated-deltanet"].gated_deltanet
    assert (delta.num_heads, delta.key_size, delta.value_size) == (6, 192, 384)
    assert PRESETS["0.8b-attention-24-layers"].num_layers == 24
    assert PRESETS["0.8b-attention"].attention.num_heads == 16
    assert PRESETS["0.8b-attention"].attention.rope_theta == 500_000
    assert all(c.num_levels == 15 for n, c in PRESETS.items() if n.startswith("0.8b"))


def test_config_is_frozen(small_config: Config) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        small_config("mamba2").d_model = 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_modle": 64}, "d_modle\n  Extra inputs"),
        ({"mamba2": {"heads": 3}}, "mamba2.heads\n  Extra inputs"),
        ({"mixer": "mamba3"}, "mixer"),
        ({"mixer": ["mamba2"] * 3}, "pattern has 3 entries: expected 1 to num_layers=2"),
        ({"mixer": []}, "pattern has 0 entries"),
        ({"mamba2": {"head_size": 48}}, "head_size=48 does not divide .* 2 \\* 32 = 64"),
        (
            {"mamba2": {"head_size": 16, "num_groups": 3}},
            "num_groups=3 does not divide the 4 heads",
        ),
        ({"mamba2": {"state_size": 24}}, "mamba2.state_size must be a multiple of 16 .*: got 24"),
        ({"mamba2": {"state_size": 512}}, "multiple of 16 up to 256: got 512"),
        ({"mixer": "gated_deltanet", "gated_deltanet": {"key_size": 8}}, "key_size .*: got 8"),
        (
            {"mixer": "gated_deltanet", "gated_deltanet": {"value_size": 1024}},
            "up to 512: got 1024",
        ),
        ({"mixer": "attention", "attention": {"num_heads": 5}}, "num_heads=5 .* d_model=32"),
        ({"mixer": "attention", "attention": {"num_heads": 32}}, "even .* 32 / 32 = 1"),
        ({"max_seq_len": 2**20 + 1}, "max_seq_len"),
        (
            {"level_weights": {"kind": "fixed", "gelu": True}},
            "kind 'adaptive' only: got kind 'fixed'",
        ),
        ({"level_weights": {"activation": "relu"}}, "level_weights.activation"),
        ({"level_weights": {"offset": 0.5}}, "kind 'linear' only: got 0.5 with kind 'adaptive'"),
    ],
)
def test_wrong_config_is_refused_with_its_numbers(
    fields: dict[str, Any], message: str, small_config: Config
) -> None:
    fields = {"mixer": "log_linear_mamba2", **fields}
    with pytest.raises(ValidationError, match=message):
        small_config(**fields)


def test_sections_of_mixers_that_are_not_used_are_not_checked(small_config: Config) -> None:
    config = small_config("mamba2", attention={"num_heads": 5})
    assert config.attention.num_heads == 5


@pytest.mark.parametrize(
    ("max_seq_len", "levels"), [(1, 1), (2, 2), (3, 3), (4096, 13), (4097, 14)]
)
def test_levels_follow_max_seq_len(max_seq_len: int, levels: int, small_config: Config) -> None:
    assert small_config("mamba2", max_seq_len=max_seq_len).num_levels == levels
