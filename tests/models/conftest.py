"""Small configurations for the tests of models/."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.initialize import initialize
from models.language_model import LanguageModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small_config() -> Callable[..., ModelConfig]:
    """A two-layer config of every mixer; keyword arguments replace fields."""

    def build(mixer: Any, **fields: Any) -> ModelConfig:
        settings: dict[str, Any] = {
            "vocab_size": 50,
            "d_model": 32,
            "num_layers": 2,
            "mixer": mixer,
            "max_seq_len": 256,
            "init_std": 0.2,
            "mlp": {"hidden_size": 48},
            "mamba2": {"head_size": 16, "state_size": 32, "num_groups": 2},
            "gated_deltanet": {"num_heads": 2, "key_size": 16, "value_size": 32},
            "attention": {"num_heads": 2, "rope_theta": 10_000.0},
        }
        return ModelConfig.model_validate({**settings, **fields})

    return build


@pytest.fixture(scope="session")
def small_model(small_config: Callable[..., ModelConfig]) -> Callable[..., LanguageModel]:
    """An initialised small model; its lambda differs from level to level and token to token."""

    def build(mixer: Any, seed: int = 0, **fields: Any) -> LanguageModel:
        model = LanguageModel(small_config(mixer, **fields))
        initialize(model, seed)
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "level_weights" in name:
                    parameter.add_(0.5 * torch.randn(parameter.shape, generator=random))
        return model

    return build
