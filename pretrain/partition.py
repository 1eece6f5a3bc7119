"""Which pieces of which parameters the optimizer of this rank holds, at every ZeRO stage.

DeepSpeed hands its optimizer flat fp32 tensors: at stages 1 and 2 this rank's slice of a group's
concatenated parameters, at stage 3 this rank's slices of every parameter concatenated; at stage 0
the parameters themselves. A Piece says where numbers begin..end-1 of a flattened parameter lie in
such a tensor. With it, saving, loading, Muon and gradient norms are written once for all stages.
Nothing but this module knows how DeepSpeed arranges parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """Numbers begin..end-1 of a flattened parameter, at offset.. of `holder`; begin = end: none."""

    name: str
    shape: torch.Size
    begin: int
    end: int
    holder: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same numbers in a tensor that is laid out as the holder: its gradient, a moment."""
        return tensor.reshape(-1).narrow(0, self.offset, self.end - self.begin)


class Partition:
    """All pieces of this rank.

    Args:
        model: the module whose parameters DeepSpeed has taken over.
        optimizer: DeepSpeed's optimizer.
        zero_stage: 0 to 3.
        rank, world_size: of the ranks over which ZeRO shards.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, zero_stage: int, rank: int, world_size: int
    ) -> None:
        self.replicated = zero_stage == 0
        self.rank, self.world_size = rank, world_size
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if zero_stage == 0:
            self.pieces = [
                Piece(name, p.shape, 0, p.numel(), p, 0) for name, p in model.named_parameters()
            ]
        elif zero_stage < 3:
            self.pieces = [
                _piece_of_group(names[id(parameter)], parameter, holder)
                for group, holder in zip(
                    optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
                )
                for parameter in group
            ]
        else:
            self.pieces = [
                _piece_of_parameter(names[id(parameter)], parameter, optimizer, rank)
                for group in optimizer.fp16_groups
                for parameter in group
            ]
        self._by_holder: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            self._by_holder.setdefault(id(piece.holder), []).append(piece)

    def in_holder(self, holder: Tensor) -> list[Piece]:
        """Pieces in a tensor of the optimizer, empty ones too: the same names on every rank."""
        return self._by_holder[id(holder)]

    @property
    def holders(self) -> list[Tensor]:
        """The tensors that the optimizer updates."""
        return [pieces[0].holder for pieces in self._by_holder.values()]

    @property
    def own(self) -> list[Piece]:
        """The pieces that this rank saves; those of all ranks make up every parameter once."""
        if self.replicated:
            return self.pieces[self.rank :: self.world_size]
        return [piece for piece in self.pieces if piece.begin < piece.end]


def optimizer_state(piece: Piece, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The piece's numbers in every tensor of the optimizer that is laid out as its holder."""
    return {
        key: piece.of(value)
        for key, value in state.get(piece.holder, {}).items()
        if torch.is_tensor(value) and value.numel() == piece.holder.numel() and key != "step"
    }


def _piece_of_group(name: str, parameter: Tensor, holder: Tensor) -> Piece:
    """Stages 1 and 2."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return Piece(name, parameter.shape, 0, 0, holder, 0)
    inside, address = mapping.lp_fragment_address, mapping.hp_fragment_address
    end = inside.start + inside.numel
    return Piece(name, parameter.shape, inside.start, end, holder, address.start)


def _piece_of_parameter(name: str, parameter: Any, optimizer: Any, rank: int) -> Piece:
    """Stage 3: a rank's slice is as long as that of the others, and padded where numbers end."""
    group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    begin = min(rank * numel, parameter.ds_numel)
    end = min(begin + numel, parameter.ds_numel)
    holder = optimizer.fp32_partitioned_groups_flat[group]
    return Piece(name, parameter.ds_shape, begin, end, holder, offset)
