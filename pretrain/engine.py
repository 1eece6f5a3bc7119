"""DeepSpeed as this project uses it: one update, one validation, full weights.

DeepSpeed's JSON is derived from RunConfig. Parameters are stored in fp32 and bf16 is an autocast
around the forward pass, so master weights, gradient accumulation, gradient reduction and optimizer
state are fp32 at every ZeRO stage. The loss is the mean over the valid tokens of the GLOBAL batch:
however rows are split into micro-batches and ranks, and however unequal their numbers of valid
tokens, loss and gradients are the same up to rounding.
"""

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from data_prep.shards import IGNORED_LABEL
from pretrain.config import RunConfig
from pretrain.data import MicroBatch
from pretrain.distributed import World
from pretrain.optimizer import build_optimizer

ENGINE_FOLDER = "engine"
"""Name of the folder of DeepSpeed's shards inside a checkpoint."""


@dataclass(frozen=True)
class Update:
    """What one update did.

    loss: nats per valid token of the global batch, before the update.
    grad_norm: global L2 norm of the gradient, before clipping.
    stop_requested: whether any rank was asked to stop.

    All are the same on every rank.
    """

    loss: float
    grad_norm: float
    stop_requested: bool

    @property
    def is_finite(self) -> bool:
        """False: the parameters are spoilt, the run has to go back to its last checkpoint."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class SummedLoss(nn.Module):
    """Sum of the losses of a micro-batch's valid tokens.

    The autocast is in here because DeepSpeed switches one off that surrounds its engine.
    """

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        super().__init__()
        self.model = model
        self.device_type = device.type
        self.bf16 = precision == "bf16"

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16):
            logits = self.model(tokens, cu_seqlens=cu_seqlens)
        return cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )


def deepspeed_settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration, a pure function of the run's."""
    return {
        "train_batch_size": config.batch_rows,
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_rows,
        "gradient_accumulation_steps": config.micro_batches(world_size),
        "gradient_clipping": config.optimizer.clip_norm or 0.0,
        "zero_optimization": {
            "stage": config.parallel.zero_stage,
            # Overlapped reduction has given wrong gradients at stage 2 (DeepSpeed#4298, #5294).
            "overlap_comm": False,
        },
        # A torch.optim.AdamW of ours; DeepSpeed would compile its own at the start.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


class Engine:
    """A model, its optimizer and DeepSpeed, on one rank.

    Args:
        model: LanguageModel with initial parameters, the same on every rank, fp32.
        config: the run.
        world: the ranks; their process group is initialised.
        device: where this rank computes.
    """

    def __init__(
        self, model: nn.Module, config: RunConfig, world: World, device: torch.device
    ) -> None:
        self.world = world
        self.device = device
        deepspeed = import_deepspeed(device)
        self._gathered = deepspeed.zero.GatheredParameters
        deepspeed.init_distributed(verbose=False)
        module = SummedLoss(model.to(device), device, config.parallel.precision)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(model, config.optimizer),
            config=deepspeed_settings(config, world.size),
        )
        self._zero_stage = config.parallel.zero_stage

    def update(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float, stop_requested: bool
    ) -> Update:
        """Forward and backward over this rank's micro-batches, then one update over all ranks."""
        self._engine.train()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        (valid_tokens,) = self.world.sum([sum(batch.valid_tokens for batch in micro_batches)])
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        grad_norm = math.nan
        for i, batch in enumerate(micro_batches):
            micro_loss = self._loss_sum(batch)
            # DeepSpeed averages gradients over ranks; multiplying by their number leaves the sum.
            self._engine.backward(
                micro_loss * (self.world.size / max(valid_tokens, 1)), scale_wrt_gas=False
            )
            loss_sum += micro_loss.detach()
            if self._zero_stage == 0 and i == len(micro_batches) - 1:
                grad_norm = self._reduced_grad_norm()
            self._engine.step()
        if self._zero_stage > 0:
            grad_norm = float(self._engine.get_global_grad_norm())
        total, stops = self.world.sum([loss_sum.item(), float(stop_requested)])
        return Update(total / max(valid_tokens, 1), grad_norm, stop_requested=stops > 0)

    @torch.no_grad()
    def validation_loss(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Nats per valid token over all ranks' micro-batches."""
        self._engine.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        valid_tokens = 0
        for batch in micro_batches:
            loss_sum += self._loss_sum(batch)
            valid_tokens += batch.valid_tokens
        total, count = self.world.sum([loss_sum.item(), valid_tokens])
        return total / max(count, 1)

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Every parameter of the model in fp32 on the CPU of rank 0; an empty dict elsewhere.

        All ranks take part: at ZeRO-3 each parameter is gathered from all of them, one at a time.
        """
        weights = {}
        for name, parameter in self._engine.module.model.named_parameters():
            with self._gathered([parameter], enabled=self._zero_stage == 3):
                if self.world.rank == 0:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return weights

    def save(self, folder: Path) -> None:
        """Writes this rank's shards into folder/engine; all ranks take part."""
        self._engine.save_checkpoint(str(folder), tag=ENGINE_FOLDER, save_latest=False)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, on as many ranks and at the same ZeRO stage.

        DeepSpeed unpickles its shards: only resume checkpoints from people you trust.
        """
        self._engine.load_checkpoint(str(folder), tag=ENGINE_FOLDER)

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        batch = batch.to(self.device)
        return self._engine(batch.tokens, batch.labels, batch.cu_seqlens)

    def _reduced_grad_norm(self) -> float:
        """At ZeRO-0 DeepSpeed keeps no norm: taken here, between reduction and clipping."""
        grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(grads))


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for a kind of device; late, since it takes seconds and guesses one."""
    os.environ["DS_ACCELERATOR"] = device.type
    # Names that torch is about to give up and DeepSpeed still uses, at every ZeRO-3 gather.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # An all-reduce for inference, which g++ would compile for minutes at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
