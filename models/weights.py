"""The model directory on disk: config.json, model.safetensors and, if any, tokenizer.model.

One writer and one reader. Nothing read runs: JSON and safetensors only. A step folder of a run
holds these files too, so it is a model directory (models/checkpoint_directory.py says which are
complete).
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint_directory import resolve, sync_folder, write_atomically
from models.config import ModelConfig
from models.language_model import LanguageModel

FORMAT_VERSION = 1


def save_model(
    directory: Path | str,
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_path: Path | str | None = None,
) -> None:
    """Writes a model directory, each file atomically and config.json last.

    Args:
        directory: made if missing.
        state_dict: exactly the parameters of LanguageModel(config); written as they are, on any
            device.
        tokenizer_path: copied to tokenizer.model.

    Raises:
        ValueError: state_dict is not that of the model.
    """
    directory = Path(directory)
    _check_state_dict(state_dict, config, "state_dict")
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"model.safetensors.{os.getpid()}.tmp"
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in state_dict.items()}, temporary
    )
    _replace(temporary, directory / "model.safetensors")
    if tokenizer_path is not None:
        temporary = directory / f"tokenizer.model.{os.getpid()}.tmp"
        shutil.copyfile(tokenizer_path, temporary)
        _replace(temporary, directory / "tokenizer.model")
    content = {"format_version": FORMAT_VERSION, "model": config.model_dump(mode="json")}
    write_atomically(directory / "config.json", json.dumps(content, indent=1).encode())


def load_config(directory: Path | str) -> ModelConfig:
    """The ModelConfig of a model directory (or of what `resolve` makes of the path).

    Raises:
        FileNotFoundError: no such model directory.
        ValueError: config.json is damaged or of another version.
    """
    path = resolve(directory) / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version!r}; this version reads {FORMAT_VERSION}"
        )
    try:
        return ModelConfig.model_validate(content.get("model"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} does not describe a model: {where}: {first['msg']}") from None


def load_model(path: Path | str, device: torch.device | str = "cpu") -> LanguageModel:
    """The model of a run, step folder or model directory: fp32, eval mode, on `device`.

    Raises:
        FileNotFoundError: no such model directory, or no complete checkpoint in the run.
        ValueError: weights and configuration do not belong together, or a file is damaged.
    """
    directory = resolve(path)
    config = load_config(directory)
    weights = directory / "model.safetensors"
    try:
        state_dict = load_file(weights, device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged: {error}") from None
    _check_state_dict(state_dict, config, str(weights))
    with torch.device("meta"):
        model = LanguageModel(config)
    state_dict = {name: tensor.float() for name, tensor in state_dict.items()}
    model.load_state_dict(state_dict, assign=True)
    return model.eval()


def _check_state_dict(state_dict: Mapping[str, Tensor], config: ModelConfig, source: str) -> None:
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in LanguageModel(config).named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{source} does not fit the model's configuration: {problems[0]}{more}")


def _replace(temporary: Path, path: Path) -> None:
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
