"""AdamW, and Muon for hidden matrices, over the parameter groups that models/ defines.

    AdamW   m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
            p = p - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay p)
    Muon    m = momentum m + (1 - momentum) g;   u = (1 - momentum) g + momentum m
            p = p - lr (0.2 sqrt(max(rows, columns)) O(u) + weight_decay p)

O(u), the nearest orthogonal matrix by Newton-Schulz iterations in bf16, and its scale are
torch.optim.Muon's. ZeRO hands an optimizer slices of flattened parameters, which have no such
matrix: u is put together from all ranks for one matrix at a time, and each rank keeps its slice of
the result, so Muon works at every stage and its momentum is sharded like AdamW's moments.

Weight decay acts on the parameters classed for it and on no other; which ones these are is decided
in models/parameter_groups.py, which refuses a parameter it does not know.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from models.parameter_groups import decays, is_hidden_matrix, layer_group
from pretrain.partition import Partition
from pretrain.sections import OptimizerConfig


class GuardedOptimizer(AdamW):
    """The optimizer that DeepSpeed calls at the end of an update, once for every group.

    Args:
        groups: of parameters with weight_decay and `muon`.
        settings: the run's.
        fused: AdamW as one kernel, for parameters on a GPU; its counts of steps lie there too.

    Attributes:
        partition: to be set once DeepSpeed has arranged the parameters, before the first update.
        skip: leave parameters and state as they are.
        squared_norms: where set, gets the squares of this rank's share of the gradient's norm by
            layer group, after clipping.
    """

    partition: Partition

    def __init__(
        self, groups: list[dict[str, Any]], settings: OptimizerConfig, fused: bool = False
    ) -> None:
        super().__init__(
            groups, lr=settings.peak_lr, betas=settings.betas, eps=settings.eps, fused=fused or None
        )
        self.settings = settings
        self.fused = fused
        self.skip = False
        self.squared_norms: dict[str, Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "DeepSpeed gives none"
        groups = self.param_groups  # DeepSpeed puts one group here at a time
        if self.squared_norms is not None:
            self._add_norms(self.squared_norms)
        if self.skip:
            return
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            if group["muon"]:
                for holder in group["params"]:
                    self._orthogonal_step(holder, group["lr"], group["weight_decay"])

    def create_state(self, updates: int) -> None:
        """State as after `updates` updates but for the moments, which are 0 and to be filled."""
        for holder in self.partition.holders:
            zeros = partial(torch.zeros_like, holder.detach())
            if uses_muon(self.partition.in_holder(holder)[0].name, self.settings):
                self.state[holder] = {"momentum_buffer": zeros()}
            else:
                near = holder.device if self.fused else None
                step = torch.full((), float(updates), device=near)
                self.state[holder] = {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}

    def _add_norms(self, squares: dict[str, Tensor]) -> None:
        for group in self.param_groups:
            for holder in group["params"]:
                if holder.grad is None:
                    continue
                for piece in self.partition.in_holder(holder):
                    square = piece.of(holder.grad).double().square().sum()
                    name = layer_group(piece.name)
                    squares[name] = squares[name] + square if name in squares else square

    def _orthogonal_step(self, holder: Tensor, lr: float, weight_decay: float) -> None:
        if holder.grad is None:
            return
        momentum, state = self.settings.momentum, self.state[holder]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(holder.detach())
        average = state["momentum_buffer"].lerp_(holder.grad, 1 - momentum)
        update = holder.grad.lerp(average, momentum)
        holder.mul_(1 - lr * weight_decay)
        for piece in self.partition.in_holder(holder):
            whole = piece.of(update)
            if not self.partition.replicated:
                whole = update.new_zeros(piece.shape.numel())
                whole[piece.begin : piece.end] = piece.of(update)
                dist.all_reduce(whole)  # of zeros and one number each: exact
            matrix = nn.Parameter(whole.new_zeros(piece.shape))
            matrix.grad = whole.view(piece.shape)
            Muon([matrix], lr, 0.0, 0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
            piece.of(holder).add_(matrix.detach().flatten()[piece.begin : piece.end])


def uses_muon(name: str, settings: OptimizerConfig) -> bool:
    """Whether Muon updates the parameter of this name, and not AdamW."""
    return settings.kind == "muon" and is_hidden_matrix(name)


def parameter_table(
    model: nn.Module, settings: OptimizerConfig
) -> dict[tuple[bool, float], list[str]]:
    """Names of the parameters by (Muon?, weight decay), in the order of the groups.

    Raises:
        ValueError: a parameter of the model has no class.
    """
    table: dict[tuple[bool, float], list[str]] = {}
    for name, _ in model.named_parameters():
        decay = settings.weight_decay if decays(name) else 0.0
        table.setdefault((uses_muon(name, settings), decay), []).append(name)
    return dict(sorted(table.items(), reverse=True))


def build_optimizer(
    model: nn.Module, settings: OptimizerConfig, fused: bool = False
) -> GuardedOptimizer:
    """The optimizer of a model; the learning rate is set at every step.

    Args:
        fused: see GuardedOptimizer.

    Raises:
        ValueError: a parameter of the model has no class.
    """
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in names], "muon": muon, "weight_decay": decay}
        for (muon, decay), names in parameter_table(model, settings).items()
    ]
    return GuardedOptimizer(groups, settings, fused)
