"""Import: a Hugging Face folder of ours, or another code base's checkpoint, as a model directory.

Weights are streamed and stay in the dtype they have, except that what must be fp32 becomes fp32.
The result is read back and every tensor compared bit by bit with its source.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import ValidationError

from data_prep.tokenizer import Tokenizer
from models.checkpoint_directory import file_sha256, write_atomically
from models.config import ModelConfig
from models.foreign_settings import read_settings
from models.foreign_tensors import weight_files
from models.generation_settings import GenerationSettings, read_generation_settings
from models.huggingface.folder import PARAMETER_PREFIX
from models.interchange import Foreign, ForeignFormat, read_foreign
from models.model_card import model_card
from models.output_folder import is_complete, new_folder
from models.parameter_groups import decays
from models.proof import ProofError
from models.tensor_files import MAX_SHARD_BYTES, LazyTensor, LazyTensors, open_tensors
from models.weights import FORMAT_VERSION, check_fits, write_model

ImportFormat = Literal["huggingface", "fla", "hattention", "mamba_ssm"]


@dataclass(frozen=True)
class ImportResult:
    """complete_before: nothing was written. tensors: how many. note: what was left out, if any."""

    complete_before: bool
    tensors: int = 0
    note: str = ""


def import_model(
    checkpoint: Path | str,
    output: Path | str,
    source_format: ImportFormat = "huggingface",
    *,
    max_seq_len: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ImportResult:
    """Writes the model of `checkpoint` as a model directory into the new folder `output`.

    Args:
        checkpoint: a folder with config.json and weights (safetensors or torch files).
        source_format: whose folder it is (models/interchange.py; huggingface: an export of ours).
        max_seq_len: longest document, for models of others without levels.

    Raises:
        FileNotFoundError, ValueError: no such model, one that ours cannot be (the setting or
            tensor is named), or the output is something else's.
        ProofError: what was written is not what was read; the output is not there then.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if source_format not in get_args(ImportFormat):
        raise ValueError(
            f"unknown format: got {source_format!r}; expected {', '.join(get_args(ImportFormat))}"
        )
    source = _read(checkpoint, source_format, max_seq_len)
    check_fits(source.tensors, source.config, str(checkpoint))
    stored = {
        name: tensor if decays(name) else tensor.to(torch.float32)
        for name, tensor in source.tensors.items()
    }
    made_from = {
        "from": source_format,
        "max_seq_len": max_seq_len,
        "max_shard_bytes": max_shard_bytes,
        "source": _hashes(checkpoint),
    }
    if is_complete(output, made_from):
        return ImportResult(complete_before=True)
    tokenizer, note = _tokenizer(checkpoint, source.config)
    with new_folder(output, made_from) as folder:
        write_model(folder, stored, source.config, tokenizer, max_shard_bytes)
        source.generation.save(folder)
        dtype = "bf16" if any(t.dtype != torch.float32 for t in stored.values()) else "fp32"
        card = model_card(source.config, "fenwick", dtype, None)
        write_atomically(folder / "README.md", card.encode())
        _compare(open_tensors(folder), stored)
    return ImportResult(False, len(stored), note)


def _read(checkpoint: Path, source_format: ImportFormat, max_seq_len: int | None) -> Foreign:
    if source_format != "huggingface":
        foreign: ForeignFormat = source_format
        return read_foreign(checkpoint, foreign, max_seq_len)
    if max_seq_len is not None:
        raise ValueError(
            f"max_seq_len is known of a Hugging Face folder of ours: got {max_seq_len}; leave it "
            "out, and lengthen the result with python -m models extend-context"
        )
    settings = read_settings(checkpoint)
    kind = settings.get("model_type")
    if kind != "fenwick":
        raise ValueError(
            f"{checkpoint} is no export of ours: got model_type {kind!r}; expected 'fenwick'; for "
            "a model of another code base say whose with --from"
        )
    tensors = {
        name.removeprefix(PARAMETER_PREFIX): tensor
        for name, tensor in open_tensors(checkpoint).items()
    }
    generation = read_generation_settings(checkpoint) or GenerationSettings()
    return Foreign(_our_config(settings, checkpoint), tensors, generation)


def _our_config(settings: dict[str, Any], checkpoint: Path) -> ModelConfig:
    section = settings.get("fenwick")
    version = section.get("format_version") if isinstance(section, dict) else None
    if not isinstance(section, dict) or version != FORMAT_VERSION:
        raise ValueError(
            f"{checkpoint / 'config.json'} has format_version {version!r}; this version reads "
            f"{FORMAT_VERSION}"
        )
    try:
        return ModelConfig.model_validate(section.get("model"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{checkpoint / 'config.json'} does not describe a model: {where}: {first['msg']}"
        ) from None


def _tokenizer(checkpoint: Path, config: ModelConfig) -> tuple[Path | None, str]:
    """tokenizer.model where ours can use it; else None and a line that says why not."""
    path = checkpoint / "tokenizer.model"
    if not path.is_file():
        return None, f"no tokenizer.model in {checkpoint}: the result has none"
    try:
        vocab_size = Tokenizer.load(path).vocab_size
    except ValueError as error:
        return None, f"tokenizer.model left out: {error}"
    if vocab_size > config.vocab_size:
        return None, f"tokenizer.model left out: {vocab_size} pieces, the model has fewer"
    return path, ""


def _compare(found: LazyTensors, wanted: LazyTensors) -> None:
    for name, tensor in wanted.items():
        if name not in found or not _equal_bits(found[name], tensor):
            raise ProofError(f"what was written is not what was read: {name}; nothing was kept")


def _equal_bits(one: LazyTensor, two: LazyTensor) -> bool:
    a, b = one.load().contiguous(), two.load().contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def _hashes(checkpoint: Path) -> dict[str, str]:
    paths = [checkpoint / "config.json", checkpoint / "tokenizer.model", *weight_files(checkpoint)]
    return {path.name: file_sha256(path) for path in paths if path.is_file()}
