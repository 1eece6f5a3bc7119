"""Export: a model into a folder of its own, weights streamed, the result proven.

    fenwick        a model directory: config.json, weights in shards, tokenizer.model,
                   generation_config.json, README.md
    huggingface    the same with transformers' config.json and the code to run it
                   (models/huggingface/), for AutoModelForCausalLM and AutoTokenizer

Before a folder gets its name, it is read back and its logits on a sample text are compared with
those of the source (models/proof.py); it never appears where they differ. Folders are made
atomically, and the same command run again says that it is complete (models/output_folder.py).
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from data_prep.tokenizer import Tokenizer
from models.checkpoint_directory import (
    MANIFEST_NAME,
    file_sha256,
    read_manifest,
    resolve,
    write_atomically,
)
from models.config import ModelConfig
from models.generation_settings import GenerationSettings, read_generation_settings
from models.huggingface.folder import PARAMETER_PREFIX, code_files, write_folder
from models.huggingface.proof import check_transformers, folder_logits
from models.model_card import model_card
from models.output_folder import is_complete, new_folder
from models.parameter_groups import decays
from models.proof import SAMPLE_TEXT, ProofError, sample_tokens, streamed_logits
from models.tensor_files import (
    MAX_SHARD_BYTES,
    LazyTensor,
    LazyTensors,
    open_tensors,
    save_tensors,
)
from models.weights import check_fits, load_config, write_model

HUGGINGFACE_TOLERANCE = 1e-4
"""Largest difference of logits in another process, relative to the largest logit."""

Format = Literal["fenwick", "huggingface"]
Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Result:
    """What an export did.

    complete_before: nothing was written, the output was there already.
    max_difference: between the logits of source and output on the sample text, the source's
        matrices rounded to the stored dtype.
    rounding: largest change of those logits by that rounding; 0 for fp32.
    tokens: length of the sample.
    """

    complete_before: bool
    max_difference: float = 0.0
    rounding: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Source:
    """A model on disk that is about to be written elsewhere; its tensors are not loaded.

    facts: checkpoint.json of a training checkpoint. sha256: of every file that is the model.
    """

    config: ModelConfig
    tensors: LazyTensors
    tokenizer: Path | None
    generation: GenerationSettings
    facts: Mapping[str, Any] | None
    sha256: dict[str, str]


def open_source(checkpoint: Path | str) -> Source:
    """The model of a run (newest complete checkpoint), a step folder or a model directory.

    Raises:
        FileNotFoundError, ValueError: as `load_model`.
    """
    directory = resolve(checkpoint)
    config = load_config(directory)
    tensors = open_tensors(directory)
    check_fits(tensors, config, str(directory))
    tokenizer = directory / "tokenizer.model"
    found = tokenizer if tokenizer.is_file() else None
    manifest = directory / MANIFEST_NAME
    return Source(
        config=config,
        tensors=tensors,
        tokenizer=found,
        generation=read_generation_settings(directory) or _generation_of(found),
        facts=read_manifest(directory) if manifest.is_file() else None,
        sha256=_hashes(directory),
    )


def export(
    checkpoint: Path | str,
    output: Path | str,
    *,
    format: Format = "fenwick",  # noqa: A002
    dtype: Dtype = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Result:
    """Writes the model of `checkpoint` into the new folder `output` and proves the result.

    Args:
        checkpoint: a run, a step folder or a model directory.
        output: a free name, an empty folder, or the result of the same export.
        dtype: of the matrices (what weight decay acts on). Norms, biases, gates and lambda are
            stored in fp32 always.
        max_shard_bytes: larger weights are cut into shards of this size.

    Raises:
        FileNotFoundError, ValueError: no such model, or the output is something else's.
        ProofError: the written files compute something else; the output is not there then.
    """
    if format == "huggingface":
        check_transformers()
    output, source = Path(output), open_source(checkpoint)
    made_from: dict[str, Any] = {
        "format": format,
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
        "source": source.sha256,
    }
    if format == "huggingface":
        made_from["code"] = hashlib.sha256("".join(code_files().values()).encode()).hexdigest()
    if is_complete(output, made_from):
        return Result(complete_before=True)
    stored = as_stored(source.tensors, dtype)
    tokens = sample_tokens(source.config, source.tokenizer)
    wanted = streamed_logits(source.config, stored, tokens)
    rounding = 0.0
    if dtype != "fp32":
        exact = streamed_logits(source.config, source.tensors, tokens)
        rounding = float((exact - wanted).abs().max())
    with new_folder(output, made_from) as folder:
        if format == "fenwick":
            write_model(folder, stored, source.config, source.tokenizer, max_shard_bytes)
        else:
            _write_huggingface(folder, source, stored, dtype, max_shard_bytes)
        source.generation.save(folder)
        card = model_card(source.config, format, dtype, source.facts)
        write_atomically(folder / "README.md", card.encode())
        if format == "fenwick":
            found = streamed_logits(load_config(folder), open_tensors(folder), tokens)
            difference = _difference(found, wanted, 0.0)
        else:
            difference = _prove_huggingface(folder, source, tokens, wanted)
    return Result(False, difference, rounding, tokens.shape[1])


def as_stored(tensors: LazyTensors, dtype: Dtype) -> dict[str, LazyTensor]:
    """Tensors in the dtype in which they are stored: matrices in `dtype`, everything else fp32."""
    matrices = torch.float32 if dtype == "fp32" else torch.bfloat16
    return {
        name: tensor.to(matrices if decays(name) else torch.float32)
        for name, tensor in tensors.items()
    }


def _write_huggingface(
    folder: Path, source: Source, stored: LazyTensors, dtype: Dtype, max_shard_bytes: int
) -> None:
    renamed = {PARAMETER_PREFIX + name: tensor for name, tensor in stored.items()}
    save_tensors(folder, renamed, max_shard_bytes)
    if source.tokenizer is not None:
        shutil.copyfile(source.tokenizer, folder / "tokenizer.model")
    torch_dtype = "float32" if dtype == "fp32" else "bfloat16"
    write_folder(
        folder, source.config, source.generation, torch_dtype, source.tokenizer is not None
    )


def _prove_huggingface(
    folder: Path, source: Source, tokens: torch.Tensor, wanted: torch.Tensor
) -> float:
    text = None if source.tokenizer is None else SAMPLE_TEXT
    try:
        found, ids = folder_logits(folder, tokens[0].tolist(), text)
    except RuntimeError as error:
        raise ProofError(f"{error}; nothing was kept") from None
    if ids is not None and source.tokenizer is not None:
        tokenizer = Tokenizer.load(source.tokenizer)
        if ids != [tokenizer.bos_id, *tokenizer.encode(SAMPLE_TEXT)]:
            raise ProofError(
                "transformers' tokenizer gives other ids than the model's; nothing was kept"
            )
    # Another process may use another number of threads, which changes the order of sums.
    return _difference(found, wanted, HUGGINGFACE_TOLERANCE * max(1.0, float(wanted.abs().max())))


def _difference(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> float:
    """The largest difference; ProofError where it is above the tolerance or not a number."""
    difference = float((found - wanted).abs().max())
    if not difference <= tolerance:
        raise ProofError(
            f"what was written computes other logits: they differ by up to {difference:.3g}; "
            f"expected at most {tolerance:.3g}; nothing was kept"
        )
    return difference


def _generation_of(tokenizer_path: Path | None) -> GenerationSettings:
    if tokenizer_path is None:
        return GenerationSettings()
    tokenizer = Tokenizer.load(tokenizer_path)
    # unk: byte fallback never produces it, so a pad can always be told from text.
    return GenerationSettings(tokenizer.bos_id, tokenizer.eos_id, pad_token_id=0)


def _hashes(directory: Path) -> dict[str, str]:
    paths = [directory / "config.json", directory / "tokenizer.model"]
    paths += sorted(directory.glob("model*.safetensors"))
    return {path.name: file_sha256(path) for path in paths if path.is_file()}
