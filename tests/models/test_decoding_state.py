"""A decoding state on disk: going on from it is bit-equal, and nothing else is taken for one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import MIXER_NAMES
from models.decoding_state import join_states, load_state, save_state
from models.language_model import LanguageModel, ModelState

Build = Callable[..., LanguageModel]
HYBRID = ("log_linear_gated_deltanet", "attention", "mamba2")


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _read(model: LanguageModel) -> ModelState:
    """Two rows at positions 30 and 7, some of it read step by step."""
    states = []
    for n in (28, 5):
        _, state = model.prefill(_tokens(1, n), model.empty_state(1))
        states.append(state)
    state = join_states(states)
    for t in range(2):
        _, state = model.step(_tokens(2, 2)[:, t], state)
    return state


@pytest.mark.parametrize("mixer", [*MIXER_NAMES, HYBRID], ids=str)
@torch.no_grad()
def test_loaded_state_goes_on_bit_equal(mixer: Any, small_model: Build, tmp_path: Path) -> None:
    window = {"num_heads": 2, "window": 9}
    model = small_model(mixer, num_layers=3, attention=window)
    state = _read(model)
    save_state(tmp_path / "state", state, model)
    loaded = load_state(tmp_path / "state", model)
    assert loaded.position.tolist() == [30, 7]
    for t in range(20):
        expected, state = model.step(_tokens(2, 20)[:, t], state)
        logits, loaded = model.step(_tokens(2, 20)[:, t], loaded)
        assert torch.equal(logits, expected), t
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == ["state.json", "state.safetensors"]


def test_wrong_states_are_refused(small_model: Build, tmp_path: Path) -> None:
    model = small_model("log_linear_mamba2")
    with pytest.raises(FileNotFoundError, match=r"no decoding state: .*state\.json does not exist"):
        load_state(tmp_path, model)
    save_state(tmp_path, _read(model), model)
    with pytest.raises(ValueError, match="state of a model with another configuration"):
        load_state(tmp_path, small_model("mamba2"))
    facts = json.loads((tmp_path / "state.json").read_text())
    tensors = (tmp_path / "state.safetensors").read_bytes()
    (tmp_path / "state.safetensors").write_bytes(tensors[:-1] + b"x")
    with pytest.raises(ValueError, match="does not have the sha256"):
        load_state(tmp_path, model)
    (tmp_path / "state.safetensors").write_bytes(tensors)
    load_state(tmp_path, model)
    (tmp_path / "state.json").write_text(json.dumps({**facts, "format_version": 9}))
    with pytest.raises(ValueError, match="format_version 9; this version reads 1"):
        load_state(tmp_path, model)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_state(tmp_path, model)
