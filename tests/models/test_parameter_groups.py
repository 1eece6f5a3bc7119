"""Classes of parameters."""

import pytest
import torch

from models.config import PRESETS
from models.language_model import LanguageModel
from models.parameter_groups import decays, is_fp32, is_hidden_matrix, layer_group


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_every_parameter_of_every_preset_has_a_class(preset: str, kind: str) -> None:
    level_weights = PRESETS[preset].level_weights.model_copy(update={"kind": kind})
    with torch.device("meta"):
        model = LanguageModel(PRESETS[preset].model_copy(update={"level_weights": level_weights}))
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and "level_weights." not in name
        assert decays(name) == matrix, name
        assert is_fp32(name) == (
            name.endswith((".A_log", ".dt_bias", ".D")) or "level_weights." in name
        ), name


@pytest.mark.parametrize(
    ("name", "decayed", "fp32"),
    [
        ("embedding.weight", True, False),
        ("module.blocks.3.mixer.level_proj.weight", True, False),
        ("blocks.0.mixer.conv.weight", True, False),
        ("blocks.0.mixer.conv.bias", False, False),
        ("blocks.0.mixer.norm.weight", False, False),
        ("norm.weight", False, False),
        ("blocks.0.mixer.D", False, True),
        ("blocks.0.mixer.level_weights.W1", False, True),
        ("blocks.0.mixer.level_weights.a", False, True),
    ],
)
def test_class_by_name(name: str, decayed: bool, fp32: bool) -> None:
    assert decays(name) == decayed
    assert is_fp32(name) == fp32


@pytest.mark.parametrize("classify", [decays, is_fp32])
@pytest.mark.parametrize("name", ["weight", "blocks.0.mixer.new_gate", "blocks.0.mixer.w1"])
def test_unknown_parameter_is_refused(classify: object, name: str) -> None:
    with pytest.raises(ValueError, match=f"parameter {name} belongs to no group"):
        classify(name)  # type: ignore[operator]


def test_hidden_matrices_are_projections_only() -> None:
    with torch.device("meta"):
        model = LanguageModel(PRESETS["125m-log-linear-mamba2"])
    hidden = {name for name, _ in model.named_parameters() if is_hidden_matrix(name)}
    assert {name.split(".")[-2] for name in hidden} >= {"gate_proj", "out_proj", "level_proj"}
    assert all(name.startswith("blocks.") and decays(name) for name in hidden)
    assert not any("conv" in name for name in hidden)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("embedding.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
        ("norm.weight", "norm"),
        ("blocks.11.mixer.out_proj.weight", "blocks.11.mixer"),
        ("blocks.11.mixer_norm.weight", "blocks.11.mixer"),
        ("blocks.0.mlp_norm.weight", "blocks.0.mlp"),
        ("blocks.0.mixer.level_weights.W1", "blocks.0.lambda"),
        ("blocks.0.mixer.level_proj.weight", "blocks.0.lambda"),
    ],
)
def test_layer_group_by_name(name: str, group: str) -> None:
    assert layer_group(name) == group
