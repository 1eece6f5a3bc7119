"""The model directory: one writer, one reader."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint_directory import step_folder, write_manifest
from models.config import MIXER_NAMES
from models.language_model import LanguageModel
from models.weights import load_config, load_model, save_model

Build = Callable[..., LanguageModel]


@pytest.mark.parametrize("mixer", MIXER_NAMES)
def test_saved_model_loads_bit_equal(mixer: str, small_model: Build, tmp_path: Path) -> None:
    model = small_model(mixer, tie_embeddings=mixer == "mamba2")
    save_model(tmp_path / "new" / "folder", model.state_dict(), model.config)
    loaded = load_model(tmp_path / "new" / "folder")
    assert loaded.config == model.config
    assert not loaded.training
    for (name, one), (other, two) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(one, two)
        assert two.requires_grad
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), loaded(tokens))


def test_directory_holds_no_temporary_files_and_the_tokenizer(
    small_model: Build, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "my.model"
    tokenizer.write_bytes(b"pieces")
    model = small_model("mamba2")
    for _ in range(2):  # again over the first
        save_model(tmp_path / "m", model.state_dict(), model.config, tokenizer)
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.model"]
    assert (tmp_path / "m" / "tokenizer.model").read_bytes() == b"pieces"


def test_another_tokenizer_in_the_directory_is_refused_with_both_hashes(
    small_model: Build, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "my.model"
    tokenizer.write_bytes(b"pieces")
    model = small_model("mamba2")
    save_model(tmp_path / "m", model.state_dict(), model.config, tokenizer)
    (tmp_path / "m" / "tokenizer.model").write_bytes(b"others")
    own, other = (hashlib.sha256(text).hexdigest() for text in (b"pieces", b"others"))
    with pytest.raises(ValueError, match=f"got sha256 {other}; expected {own}"):
        load_model(tmp_path / "m")


def test_half_precision_weights_load_as_fp32(small_model: Build, tmp_path: Path) -> None:
    model = small_model("mamba2")
    save_model(tmp_path, {n: t.bfloat16() for n, t in model.state_dict().items()}, model.config)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.float32}


def test_model_of_a_run_is_its_newest_complete_checkpoint(
    small_model: Build, tmp_path: Path
) -> None:
    for step in (1, 2):
        model = small_model("mamba2", seed=step)
        save_model(step_folder(tmp_path, step), model.state_dict(), model.config)
        write_manifest(step_folder(tmp_path, step), {"step": step})
    assert torch.equal(load_model(tmp_path).embedding.weight, model.embedding.weight)
    assert load_config(tmp_path) == model.config


def test_state_dict_of_another_model_is_not_saved(small_model: Build, tmp_path: Path) -> None:
    one, other = small_model("mamba2"), small_model("attention")
    with pytest.raises(ValueError, match="state_dict does not fit .* is missing \\(and .* more"):
        save_model(tmp_path / "m", one.state_dict(), other.config)
    assert not (tmp_path / "m").exists()


def test_weights_of_another_shape_are_refused(small_model: Build, tmp_path: Path) -> None:
    model = small_model("mamba2")
    save_model(tmp_path, model.state_dict(), model.config)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["vocab_size"] = 60
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"embedding.weight has shape \[50, 32\], expected \[60"):
        load_model(tmp_path)


def test_damaged_weights_are_refused(small_model: Build, tmp_path: Path) -> None:
    model = small_model("mamba2")
    save_model(tmp_path, model.state_dict(), model.config)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("3", "format_version None; this version reads 1"),
        ('{"format_version": 2}', "format_version 2; this version reads 1"),
        ('{"format_version": 1, "model": {}}', "does not describe a model: vocab_size: Field req"),
        ('{"format_version": 1}', "does not describe a model"),
    ],
)
def test_damaged_config_is_refused(
    content: str, message: str, small_model: Build, tmp_path: Path
) -> None:
    model = small_model("mamba2")
    save_model(tmp_path, model.state_dict(), model.config)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path)
