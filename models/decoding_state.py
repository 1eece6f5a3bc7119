"""What a model remembers between two calls, as rows that can be joined, picked, counted, stored.

A state has no padding: a row is what its own tokens left, whatever its neighbours read. So rows
that were read apart, at different positions, step together in one batch.

On disk a state is a folder with state.safetensors (all tensors) and state.json, written last, which
names the model's configuration and the hash of the tensors. Going on from it is bit-equal.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from models.attention import AttentionState
from models.checkpoint_directory import write_atomically
from models.language_model import LanguageModel, ModelState

STATE_FORMAT_VERSION = 1
STATE_TENSORS, STATE_FACTS = "state.safetensors", "state.json"


def join_states(states: Sequence[ModelState]) -> ModelState:
    """The rows of several states of one model, in order."""
    if len(states) == 1:
        return states[0]
    layers = tuple(_join_layers(parts) for parts in zip(*(s.layers for s in states), strict=True))
    return ModelState(layers, torch.cat([state.position for state in states]))


def pick_rows(state: ModelState, rows: Sequence[int]) -> ModelState:
    """Copies of these rows of the state, in this order."""
    index = torch.tensor(rows, dtype=torch.int64)
    return map_tensors(state, lambda tensor: tensor.index_select(0, index.to(tensor.device)))


def copy_state(state: ModelState) -> ModelState:
    """A copy that steps of the original do not touch."""
    return map_tensors(state, torch.clone)


def held_bytes(state: ModelState) -> int:
    """Memory that the state's tensors occupy, the positions (8 bytes a row) left out."""
    return sum(
        tensor.untyped_storage().nbytes()
        for name, tensor in _named_tensors(state)
        if not name.endswith("position")
    )


def save_state(directory: Path | str, state: ModelState, model: LanguageModel) -> None:
    """Writes the state's folder; a state that was there before stays valid until the end.

    Args:
        directory: made if missing.
        model: the one that the state belongs to.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = save_tensors(
        {name: tensor.detach().cpu().contiguous() for name, tensor in _named_tensors(state)}
    )
    facts = {
        "format_version": STATE_FORMAT_VERSION,
        "position": state.position.tolist(),
        "sha256": hashlib.sha256(tensors).hexdigest(),
        "model": model.config.model_dump(mode="json"),
    }
    write_atomically(directory / STATE_TENSORS, tensors)
    write_atomically(directory / STATE_FACTS, json.dumps(facts, indent=1).encode())


def load_state(directory: Path | str, model: LanguageModel) -> ModelState:
    """The state that `save_state` wrote, on the model's device.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of a model with another configuration.
    """
    directory = Path(directory)
    facts = _read_facts(directory / STATE_FACTS)
    path = directory / STATE_TENSORS
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != facts.get("sha256"):
        raise ValueError(f"{path} does not have the sha256 of {STATE_FACTS}; save the state again")
    if facts.get("model") != json.loads(json.dumps(model.config.model_dump(mode="json"))):
        raise ValueError(
            f"{directory} holds the state of a model with another configuration; expected that of "
            "the model given; load it with the model that wrote it"
        )
    try:
        tensors = load_tensors(content)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    device = model.embedding.weight.device
    template = model.empty_state(1)
    expected = {name for name, _ in _named_tensors(template)}
    if expected != tensors.keys():
        wrong = min(expected ^ tensors.keys())
        raise ValueError(f"{path} does not fit the model: tensor {wrong} is missing or unknown")
    return _fill(template, tensors, "", device)


def _read_facts(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no decoding state: {path} does not exist; save_state writes it")
    try:
        facts = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    version = facts.get("format_version") if isinstance(facts, dict) else None
    if version != STATE_FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version!r}; this version reads {STATE_FORMAT_VERSION}"
        )
    return facts


def _join_layers(parts: Sequence[Any]) -> Any:
    """One layer's states as one: tensors are joined row by row, all the way down."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if isinstance(parts[0], AttentionState):
        capacity = max(part.capacity for part in parts)
        parts = [part.grown(capacity) for part in parts]
    joined = {
        field.name: _join_layers([getattr(part, field.name) for part in parts])
        for field in fields(parts[0])
    }
    return replace(parts[0], **joined)


def map_tensors(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A state, or a part of one, with every tensor changed."""
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        return tuple(map_tensors(inner, change) for inner in part)
    changed = {f.name: map_tensors(getattr(part, f.name), change) for f in fields(part)}
    return replace(part, **changed)


def _named_tensors(part: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    """("layers.0.memory.levels", tensor), ... of a state or a part of one."""
    if isinstance(part, Tensor):
        return [(prefix, part)]
    inner = enumerate(part) if isinstance(part, tuple) else _items(part)
    dot = "." if prefix else ""
    return [pair for name, value in inner for pair in _named_tensors(value, f"{prefix}{dot}{name}")]


def _items(part: Any) -> list[tuple[str, Any]]:
    assert is_dataclass(part)
    return [(field.name, getattr(part, field.name)) for field in fields(part)]


def _fill(part: Any, tensors: dict[str, Tensor], prefix: str, device: torch.device) -> Any:
    """`part` with its tensors replaced by those stored under their names."""
    if isinstance(part, Tensor):
        tensor = tensors[prefix]
        return tensor if prefix.endswith("position") else tensor.to(device)
    dot = "." if prefix else ""
    if isinstance(part, tuple):
        return tuple(
            _fill(inner, tensors, f"{prefix}{dot}{i}", device) for i, inner in enumerate(part)
        )
    filled = {
        name: _fill(value, tensors, f"{prefix}{dot}{name}", device) for name, value in _items(part)
    }
    return replace(part, **filled)
