"""Optimizer state on disk, independent of how many ranks and which ZeRO stage wrote it.

    step-00000100/engine/rank-00000-of-00004.safetensors
        "exp_avg/blocks.0.mixer.out_proj.weight@4096"    numbers 4096.. of that flattened moment

Every rank writes the pieces it holds and reads those it is to hold, from whichever files they lie
in, no more than one piece at a time in memory. Master weights are not here: parameters are fp32, so
they are the checkpoint's model.safetensors. Nothing read runs.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from models.checkpoint_directory import sync_folder
from models.tensor_files import open_tensors
from pretrain.partition import Partition, Piece, optimizer_state

ENGINE_FOLDER = "engine"
"""Name of the folder of optimizer state inside a checkpoint."""

State = Mapping[Any, Mapping[str, Any]]


def snapshot(partition: Partition, state: State) -> dict[str, Tensor]:
    """Copies, in the memory of the CPU, of what this rank saves."""
    return {
        f"{key}/{piece.name}@{piece.begin}": tensor.detach().to("cpu", copy=True)
        for piece in partition.own
        for key, tensor in optimizer_state(piece, state).items()
    }


def write_shard(folder: Path, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> None:
    """Writes this rank's file; it appears whole, and is on the disk when this returns."""
    path = folder / f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    save_file(dict(tensors), temporary)
    os.chmod(temporary, mode)  # safetensors makes files that only their owner reads
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(folder)


def read_shards(folder: Path, partition: Partition, state: State) -> None:
    """Fills the state of this rank's pieces from all ranks' files.

    Raises:
        ValueError: a file is damaged, or some numbers are in none of them.
    """
    saved = _Saved(folder)
    for piece in partition.pieces:
        for key, tensor in optimizer_state(piece, state).items():
            saved.fill(key, piece, tensor)


@torch.no_grad()
def read_weights(folder: Path, model: nn.Module) -> None:
    """Fills the parameters of a model from a checkpoint, one at a time."""
    tensors = open_tensors(folder)
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name].load())


class _Saved:
    """What the files of all ranks hold, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from None
            for name in file.keys():  # noqa: SIM118
                whole, _, begin = name.rpartition("@")
                numel = file.get_slice(name).get_shape()[0]
                self._parts.setdefault(whole, []).append((int(begin), int(begin) + numel, file))

    def fill(self, key: str, piece: Piece, tensor: Tensor) -> None:
        name = f"{key}/{piece.name}"
        filled = 0
        for begin, end, file in self._parts.get(name, []):
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                part = file.get_slice(f"{name}@{begin}")[first - begin : last - begin]
                tensor[first - piece.begin : last - piece.begin] = part
                filled += last - first
        if filled != piece.end - piece.begin:
            raise ValueError(
                f"{self.folder} does not hold all of {name}: got {filled} of the numbers "
                f"{piece.begin} to {piece.end}; expected {piece.end - piece.begin}; take another "
                "checkpoint"
            )
