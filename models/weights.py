"""The model directory on disk: config.json, the weights and, if any, tokenizer.model.

One writer and one reader. Nothing read runs: JSON and safetensors only (models/tensor_files.py).
A step folder of a run holds these files too, so it is a model directory
(models/checkpoint_directory.py says which are complete). `python -m models export` adds a card and
generation settings (models/export.py).
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from models.checkpoint_directory import (
    TOKENIZER,
    file_sha256,
    resolve,
    sync_folder,
    write_atomically,
)
from models.config import ModelConfig
from models.language_model import LanguageModel
from models.tensor_files import MAX_SHARD_BYTES, LazyTensors, as_lazy, open_tensors, save_tensors

FORMAT_VERSION = 1


def save_model(
    directory: Path | str,
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_path: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model directory, each file atomically and config.json last.

    Args:
        directory: made if missing.
        state_dict: exactly the parameters of LanguageModel(config); written as they are, on any
            device.
        tokenizer_path: copied to tokenizer.model.
        max_shard_bytes: larger weights are cut into shards of this size.

    Raises:
        ValueError: state_dict is not that of the model.
    """
    write_model(directory, as_lazy(state_dict), config, tokenizer_path, max_shard_bytes)


def write_model(
    directory: Path | str,
    tensors: LazyTensors,
    config: ModelConfig,
    tokenizer_path: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """`save_model` of weights that need not be in memory: at most one shard of them is."""
    directory = Path(directory)
    check_fits(tensors, config, "state_dict")
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory, tensors, max_shard_bytes)
    if tokenizer_path is not None:
        temporary = directory / f"{TOKENIZER}.{os.getpid()}.tmp"
        shutil.copyfile(tokenizer_path, temporary)
        _replace(temporary, directory / TOKENIZER)
    content = {
        "format_version": FORMAT_VERSION,
        "model": config.model_dump(mode="json"),
        "tokenizer_sha256": None if tokenizer_path is None else _tokenizer_sha256(directory),
    }
    write_atomically(directory / "config.json", json.dumps(content, indent=1).encode())


def load_config(directory: Path | str) -> ModelConfig:
    """The ModelConfig of a model directory (or of what `resolve` makes of the path).

    Raises:
        FileNotFoundError: no such model directory.
        ValueError: config.json is damaged or of another version, or tokenizer.model is not the one
            that the model was written with.
    """
    path = resolve(directory) / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version is None and isinstance(content, dict) and "model_type" in content:
        raise ValueError(
            f"{path.parent} is a Hugging Face folder (model_type {content['model_type']!r}); "
            f"make a model directory of it: python -m models import {path.parent} OUTPUT"
        )
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version!r}; this version reads {FORMAT_VERSION}"
        )
    wanted, found = content.get("tokenizer_sha256"), _tokenizer_sha256(path.parent)
    if wanted is not None and found not in (None, wanted):
        raise ValueError(
            f"{path.parent / TOKENIZER} is another tokenizer than the model's: got sha256 {found}; "
            f"expected {wanted}; put the model's own back"
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
    tensors = open_tensors(directory)
    check_fits(tensors, config, str(directory))
    with torch.device("meta"):
        model = LanguageModel(config)
    state_dict = {name: tensor.load().to(device).float() for name, tensor in tensors.items()}
    model.load_state_dict(state_dict, assign=True)
    return model.eval()


def check_fits(tensors: LazyTensors, config: ModelConfig, source: str) -> None:
    """ValueError unless these are exactly the parameters of LanguageModel(config)."""
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in LanguageModel(config).named_parameters()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
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


def _tokenizer_sha256(directory: Path) -> str | None:
    path = directory / TOKENIZER
    return file_sha256(path) if path.is_file() else None


def _replace(temporary: Path, path: Path) -> None:
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
