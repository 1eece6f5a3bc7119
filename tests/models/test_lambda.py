"""`python -m models lambda`: numbers are those that the model uses, pictures are written."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.tokenizer import train_tokenizer
from kernels.levels import level
from models import __main__ as command
from models.checkpoint_directory import step_folder, write_manifest
from models.lambda_reading import LayerLambda, read_lambda
from models.language_model import LanguageModel
from models.weights import save_model

Build = Callable[..., LanguageModel]


def test_live_levels_are_those_that_hold_tokens() -> None:
    live = LayerLambda(0, torch.zeros(1, 6, 20)).live
    for t in range(20):
        assert {l for l in range(6) if live[l, t]} == {level(t, s) for s in range(t + 1)}


def test_mean_and_deviation_count_live_positions_only() -> None:
    weights = torch.arange(8.0).repeat(1, 4, 1)  # lambda = t on every level
    lambdas = LayerLambda(0, weights)
    odd = torch.tensor([1.0, 3, 5, 7])
    assert lambdas.mean[0, 1] == odd.mean()
    torch.testing.assert_close(lambdas.deviation[0, 1], odd.std(correction=0))
    assert lambdas.mean[0, 0] == 3.5
    assert lambdas.mean[0, 3] == 5.5


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_read_lambda_is_what_the_mixer_multiplies(kind: str, small_model: Build) -> None:
    mixers = ("attention", "log_linear_mamba2", "log_linear_gated_deltanet")
    settings: dict[str, Any] = {"num_layers": 3, "level_weights": {"kind": kind}}
    model, tokens = small_model(mixers, **settings), torch.arange(30)
    lambdas = read_lambda(model, tokens)
    assert [one.layer for one in lambdas] == [1, 2]
    assert [tuple(one.weights.shape) for one in lambdas] == [(4, 6, 30), (2, 6, 30)]
    expected = model(tokens[None])
    with torch.no_grad():
        for one in lambdas:  # forced to those numbers, the model is the same
            module = model.blocks[one.layer].mixer.level_weights
            weights = torch.zeros(1, 30, one.weights.shape[0], model.config.num_levels)
            weights[0, :, :, :6] = one.weights.permute(2, 0, 1)
            module.register_forward_hook(lambda *_, weights=weights: weights)
    torch.testing.assert_close(model(tokens[None]), expected)
    with pytest.raises(ValueError, match="the model has no lambda: got mixers mamba2, mamba2"):
        read_lambda(small_model("mamba2"), tokens)


def test_command_writes_pictures_table_json_and_tensorboard(
    small_model: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.py"
    text.write_text(Path(pytest.__file__).read_text())
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(train_tokenizer([text.read_text()], 400))
    model = small_model("log_linear_mamba2", vocab_size=400)
    run, output = tmp_path / "run", tmp_path / "output"
    save_model(step_folder(run, 7), model.state_dict(), model.config, tokenizer)
    write_manifest(step_folder(run, 7), {"step": 7})
    arguments = [str(run), "--text", str(text), "--output", str(output), "--max-tokens", "100"]
    monkeypatch.setattr(sys, "argv", ["models", "lambda", *arguments])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert not stop.value.code
    assert "layer 1" in capsys.readouterr().out
    names = ["lambda-layer-00.png", "lambda-layer-01.png", "lambda-means.png", "lambda.json"]
    assert sorted(path.name for path in output.iterdir()) == names
    for name in names[:3]:
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    summary = json.loads((output / "lambda.json").read_text())
    assert summary["tokens"] == 100
    assert len(summary["layers"][1]["mean"]) == 4
    assert len(summary["layers"][1]["std_over_tokens"][0]) == 8
    events = list((run / "tensorboard" / "lambda").iterdir())
    assert b"lambda/layer_01/mean/level_03" in events[0].read_bytes()
    monkeypatch.setattr(sys, "argv", ["models", "lambda", str(run), "--text", "nowhere"])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: no text file: nowhere does not exist\n"
