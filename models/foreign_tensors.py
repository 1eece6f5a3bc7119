"""Tensors of other people's checkpoints, by name, every one of them accounted for."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.tensor_files import LazyTensor, LazyTensors, as_lazy, has_tensors, open_tensors

TORCH_NAMES = ("pytorch_model.bin", "model.pt")
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights of a folder; safetensors are preferred to torch's own.

    Raises:
        FileNotFoundError: there are none.
    """
    if has_tensors(directory):
        return sorted(directory.glob("model*.safetensors*"))
    index = directory / TORCH_INDEX_NAME
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return [directory / Path(name).name for name in names]
    for name in TORCH_NAMES:
        if (directory / name).is_file():
            return [directory / name]
    raise FileNotFoundError(
        f"no weights in {directory}: expected model.safetensors (or shards) or {TORCH_NAMES[0]}"
    )


def open_weights(directory: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder: safetensors, or torch files read with weights_only=True.

    Raises:
        FileNotFoundError: no weights.
        ValueError: a file is damaged, or holds anything but tensors.
    """
    files = weight_files(directory)
    if files[0].suffix != ".bin" and files[0].suffix != ".pt":
        return open_tensors(directory)
    tensors: dict[str, LazyTensor] = {}
    for path in files:
        tensors |= as_lazy(_torch_file(path))
    return tensors


class Tensors:
    """Tensors of a checkpoint, handed out by name; what is missing or left over gets named."""

    def __init__(self, tensors: LazyTensors, source: str) -> None:
        self.tensors, self.source = tensors, source
        self.missing: list[str] = []
        self.taken: set[str] = set()

    def take(self, name: str) -> LazyTensor:
        """The tensor of this name; an empty one where it is missing (`finish` says so)."""
        self.taken.add(name)
        if name not in self.tensors:
            self.missing.append(name)
            return LazyTensor((0,), torch.float32, lambda: torch.empty(0))
        return self.tensors[name]

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor that sizes are read from.

        Raises:
            ValueError: it is missing, or has another number of dimensions.
        """
        found = self.tensors.get(name)
        if found is None:
            raise ValueError(f"{self.source} does not fit: {name} is missing")
        if len(found.shape) != dimensions:
            raise ValueError(
                f"{self.source} does not fit: {name} has shape {list(found.shape)}; expected "
                f"{dimensions} dimensions"
            )
        return found.shape

    def finish(self) -> None:
        """ValueError that names every tensor that is missing or unknown."""
        unknown = [name for name in self.tensors if name not in self.taken]
        problems = [f"{name} is missing" for name in self.missing]
        problems += [f"{name} is unknown" for name in unknown]
        if problems:
            raise ValueError(f"{self.source} does not fit: {'; '.join(problems)}")


def without_middle(tensor: LazyTensor) -> LazyTensor:
    """A depthwise convolution's [channels, 1, width] as [channels, width]."""
    if len(tensor.shape) != 3 or tensor.shape[1] != 1:
        return tensor
    return _derived(tensor, (tensor.shape[0], tensor.shape[2]), lambda x: x.squeeze(1))


def rows(tensor: LazyTensor, start: int, end: int) -> LazyTensor:
    """tensor[start:end]."""
    count = len(range(*slice(start, end).indices(tensor.shape[0])))
    shape = (count, *tensor.shape[1:])
    return _derived(tensor, shape, lambda x: x[start:end].contiguous())


def stacked(parts: list[LazyTensor]) -> LazyTensor:
    """The parts one below the other."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.load() for part in parts]))


def _derived(
    tensor: LazyTensor, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]
) -> LazyTensor:
    return LazyTensor(shape, tensor.dtype, lambda: change(tensor.load()))


def _torch_file(path: Path) -> Mapping[str, Tensor]:
    try:
        content = _torch_load(path)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path} is not a file of tensors: {said[0]}") from None
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} is not a file of tensors: it holds something else too")
    return content


def _torch_load(path: Path) -> Any:
    try:
        # Mapped: a tensor's bytes are read when it is used.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        return torch.load(path, map_location="cpu", weights_only=True)  # files older than torch 1.6
