"""Tensors on disk: one safetensors file, or shards with an index; read one tensor at a time.

    model.safetensors                                       small models
    model-00001-of-00003.safetensors, ...                   larger ones, and
    model.safetensors.index.json                            {"weight_map": {tensor name: file}}

Both are the layout that Hugging Face reads. Weights are passed around as `LazyTensors`, name ->
shape, dtype and how to load, so that a model of any size is copied, cast or renamed with no more
than one shard in memory.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint_directory import sync_folder, write_atomically

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is known but not in memory; every `load()` reads it anew."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> "LazyTensor":
        """The same tensor in another dtype, still on disk."""
        if dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda: self.load().to(dtype))


LazyTensors = Mapping[str, LazyTensor]


def as_lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Tensors that are in memory already, as if they were on disk."""

    def lazy(tensor: Tensor) -> LazyTensor:
        return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach())

    return {name: lazy(tensor) for name, tensor in tensors.items()}


def has_tensors(directory: Path) -> bool:
    """Whether there is a weights file or an index of shards in the folder."""
    return (directory / WEIGHTS_NAME).is_file() or (directory / INDEX_NAME).is_file()


def open_tensors(directory: Path) -> dict[str, LazyTensor]:
    """The tensors of a model directory, none of them loaded.

    Only one shard is open at a time: loading from another one closes the last.

    Raises:
        FileNotFoundError: no weights, or a shard that the index names is missing.
        ValueError: a file is damaged, or the index does not fit its shards.
    """
    index = directory / INDEX_NAME
    if not index.is_file():
        return open_files([directory / WEIGHTS_NAME])
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        file_names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not an index of shards: expected a weight_map") from None
    if outside := [name for name in file_names if Path(name).name != name]:
        raise ValueError(f"{index} names a file outside its folder: {outside[0]!r}")
    tensors = open_files([directory / name for name in file_names])
    if tensors.keys() != weight_map.keys():
        name = sorted(tensors.keys() ^ weight_map.keys())[0]
        raise ValueError(f"{index} does not fit its shards: {name} is in only one of the two")
    return tensors


def open_files(paths: Iterable[Path]) -> dict[str, LazyTensor]:
    """The tensors of these safetensors files together, none of them loaded.

    Raises: as `open_tensors`; ValueError too where two files hold tensors of the same name.
    """
    reader = _OneFile()
    tensors: dict[str, LazyTensor] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"weights {path} do not exist")
        found = _tensors_of(reader, path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{path} holds {twice[0]}, which another file holds too")
        tensors |= found
    return tensors


def save_tensors(
    directory: Path, tensors: LazyTensors, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes tensors into one file, or into shards where they are larger than `max_shard_bytes`.

    Each file appears whole or not at all, an index last; no more than one shard is in memory. A
    single tensor larger than the limit is a shard by itself.

    Raises:
        ValueError: max_shard_bytes < 1.
    """
    shards = _shards(tensors, max_shard_bytes)
    names = [
        WEIGHTS_NAME if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for file_name, shard in zip(names, shards, strict=True):
        _save_shard(directory / file_name, {name: tensors[name] for name in shard})
    index = directory / INDEX_NAME
    if len(shards) == 1:
        index.unlink(missing_ok=True)  # of a larger model that was here before
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {
        name: file_name
        for file_name, shard in zip(names, shards, strict=True)
        for name in sorted(shard)
    }
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomically(index, json.dumps(content, indent=1).encode())
    (directory / WEIGHTS_NAME).unlink(missing_ok=True)


class _OneFile:
    """Keeps the file that was read last open, and no other."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None

    def open(self, path: Path) -> Any:
        if path != self._path:
            self._path, self._file = None, None
            try:
                self._file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from None
            self._path = path
        return self._file


def _tensors_of(reader: _OneFile, path: Path) -> dict[str, LazyTensor]:
    file = reader.open(path)
    tensors = {}
    for name in file.keys():  # noqa: SIM118
        part = file.get_slice(name)
        dtype = _DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ValueError(
                f"{path} holds {name} as {part.get_dtype()}; expected one of {', '.join(_DTYPES)}"
            )
        tensors[name] = LazyTensor(tuple(part.get_shape()), dtype, _loader(reader, path, name))
    return tensors


def _loader(reader: _OneFile, path: Path, name: str) -> Callable[[], Tensor]:
    # A copy: what safetensors returns is a view of the mapped file and would keep it mapped.
    return lambda: reader.open(path).get_tensor(name).clone()


def _shards(tensors: LazyTensors, max_shard_bytes: int) -> list[list[str]]:
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be >= 1: got {max_shard_bytes}")
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _save_shard(path: Path, tensors: LazyTensors) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    save_file(
        {name: tensor.load().contiguous() for name, tensor in tensors.items()},
        temporary,
        metadata={"format": "pt"},  # transformers refuses files without it
    )
    os.chmod(temporary, mode)  # safetensors makes files that only their owner reads
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
