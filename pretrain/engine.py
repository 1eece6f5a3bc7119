"""DeepSpeed as this project uses it: one update, one validation, full weights.

DeepSpeed's JSON is derived from RunConfig. Parameters are stored in fp32 and bf16 is an autocast
around the forward pass, so master weights, gradient accumulation, gradient reduction and optimizer
state are fp32 at every ZeRO stage. The loss is the mean over the valid tokens of the GLOBAL batch:
however rows are split into micro-batches and ranks, and however unequal their numbers of valid
tokens, loss and gradients are the same up to rounding.

An update makes the host wait for the device once: between the reduction of gradients and the
optimizer's step, where loss and gradient norm are read together. Everything after it is decided
by numbers on the host, while the device runs. (Gradient norms of layer groups, where asked for,
are read after the step.)
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_prep.shards import IGNORED_LABEL
from models.accounting import parameter_count
from pretrain.blocks import prepare_blocks
from pretrain.config import RunConfig
from pretrain.data import MicroBatch
from pretrain.distributed import World
from pretrain.health import Health, Verdict
from pretrain.loss import SummedLoss
from pretrain.optimizer import build_optimizer
from pretrain.partition import Partition
from pretrain.state import ENGINE_FOLDER, read_shards, snapshot
from pretrain.statistics import Statistics, recording
from pretrain.timing import StepClock

NO_CLIPPING = 1e30
"""DeepSpeed looks for gradients that are not finite only where it clips."""


@dataclass(frozen=True)
class Update:
    """What one update did.

    loss: nats per valid token of the global batch, before the update; NaN where it has none.
    grad_norm: global L2 norm of the gradient, before clipping.
    verdict: whether parameters changed.
    votes: sum over ranks of what each passed to `update`.
    group_norms: norm of the gradient by layer group, before clipping; empty unless asked for.

    All are the same on every rank.
    """

    loss: float
    grad_norm: float
    verdict: Verdict
    votes: list[float]
    group_norms: dict[str, float]


def deepspeed_settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration, a pure function of the run's."""
    parallel = config.parallel
    # In fp32 numbers, even. DeepSpeed allocates all of it, however small the model.
    wanted = min(parallel.reduce_bucket_mb * 2**20 / 4, parameter_count(config.model) + 1)
    bucket = int(wanted) // 2 * 2
    zero: dict[str, Any] = {
        "stage": parallel.zero_stage,
        # Overlapped reduction has given wrong gradients at stage 2 (DeepSpeed#4298, #5294).
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if parallel.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        # Engine.update says itself where an update ends: batch.stages change their lengths.
        "train_batch_size": config.batch.micro_batch_rows * world_size,
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_norm or NO_CLIPPING,
        "zero_optimization": zero,
        # An optimizer of ours; DeepSpeed would compile its own at the start.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
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
        self.clock = StepClock(device)
        self.updates_taken = 0
        deepspeed = import_deepspeed(device)
        self._gathered = deepspeed.zero.GatheredParameters
        deepspeed.init_distributed(verbose=False)
        prepare_blocks(model, config.parallel)
        training = config.training
        module = SummedLoss(
            model.to(device),
            device,
            config.parallel.precision,
            training.z_loss,
            training.loss_chunk_tokens,
        )
        self._optimizer = build_optimizer(
            model,
            config.optimizer,
            fused=device.type == "cuda" and not config.parallel.offload_optimizer,
        )
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._optimizer,
            config=deepspeed_settings(config, world.size),
        )
        self._clip_norm = config.optimizer.clip_norm or NO_CLIPPING
        self._zero_stage = config.parallel.zero_stage
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._when_read: Callable[[float], None] = lambda loss_sum: None
        self._read_norms_once()
        self._optimizer.partition = Partition(
            model, self._engine.optimizer, self._zero_stage, world.rank, world.size
        )

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        learning_rate: float,
        health: Health,
        votes: Sequence[float] = (),
        with_group_norms: bool = False,
    ) -> Update:
        """Forward and backward over this rank's micro-batches, then one update over all ranks.

        Args:
            health: judges the update; it has to be told the result by `record`.
            votes: numbers to be summed over ranks along the way.
            with_group_norms: also find the gradient norms of layer groups.
        """
        self._engine.train()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        (valid_tokens,) = self.world.sum([sum(batch.valid_tokens for batch in micro_batches)])
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            with self.clock.phase("forward"):
                objective, nll = self._loss(batch)
            with self.clock.phase("backward"):
                # DeepSpeed averages gradients over ranks; times their number leaves the sum.
                self._engine.backward(
                    objective * (self.world.size / max(valid_tokens, 1)), scale_wrt_gas=False
                )
            self._loss_sum += nll
            if not last:
                self._engine.step()
        loss, verdict, votes = math.nan, Verdict.TAKE, list(votes)

        def judge(loss_sum: float, grad_is_finite: bool = True) -> None:
            nonlocal loss, verdict, votes
            total, *votes = self.world.sum([loss_sum, *votes])
            loss = total / valid_tokens if valid_tokens else math.nan
            verdict = health.judge(loss, grad_is_finite, valid_tokens)
            self._optimizer.skip = verdict.is_skipped

        squares: dict[str, Tensor] = {}
        self._optimizer.squared_norms = squares if with_group_norms else None
        with self.clock.phase("step"):
            if self._zero_stage == 0:
                # DeepSpeed keeps no norm here: taken by us, between reduction and clipping.
                loss_sum, (norm,) = self._on_host([self._reduced_grad_norm()])
                grad_norm = float(norm)
                judge(loss_sum, math.isfinite(grad_norm))
                self._engine.step()
            else:
                self._when_read = judge
                self._engine.step()
                grad_norm = float(self._engine.get_global_grad_norm())
                if self._engine.optimizer.overflow:
                    verdict = Verdict.SKIP_NOT_FINITE
        self.updates_taken += not verdict.is_skipped
        return Update(loss, grad_norm, verdict, votes, self._norms(squares, grad_norm))

    def _norms(self, squares: dict[str, Tensor], grad_norm: float) -> dict[str, float]:
        if not squares:
            return {}
        # All ranks have the same names: those whose parameters lie elsewhere with a 0.
        values = torch.stack([squares[name] for name in sorted(squares)]).tolist()
        if not self._optimizer.partition.replicated:
            values = self.world.sum(values)
        clipped_by = max(1.0, (grad_norm + 1e-6) / self._clip_norm)
        return {
            name: math.sqrt(value) * clipped_by
            for name, value in zip(sorted(squares), values, strict=True)
        }

    @torch.no_grad()
    def validation_loss(
        self, micro_batches: Iterable[MicroBatch], go_on: Callable[[], bool]
    ) -> float | None:
        """Nats per valid token over all ranks' micro-batches; None where `go_on` broke it off.

        NaN where no label counts.

        Args:
            go_on: asked before every micro-batch, with the same answer on every rank.
        """
        self._engine.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        valid_tokens = 0
        for batch in micro_batches:
            if not go_on():
                return None
            loss_sum += self._loss(batch)[1]
            valid_tokens += batch.valid_tokens
        total, count = self.world.sum([loss_sum.item(), valid_tokens])
        return total / count if count else math.nan

    @torch.no_grad()
    def statistics(self, batch: MicroBatch) -> Statistics:
        """What the model's memory does with the first row of a micro-batch; all ranks take part."""
        self._engine.eval()
        tokens = batch.tokens[:1].contiguous()
        row = MicroBatch(tokens, torch.full_like(tokens, IGNORED_LABEL), cu_seqlens=None)
        with recording(self._engine.module.model.blocks) as seen:
            self._loss(row)
        return seen

    def full_weights(self) -> dict[str, Tensor]:
        """Every parameter of the model in fp32 on the CPU of rank 0; an empty dict elsewhere.

        All ranks take part: at ZeRO-3 each parameter is gathered from all of them, one at a time.
        """
        weights = {}
        for name, parameter in self._engine.module.model.named_parameters():
            with self._gathered([parameter], enabled=self._zero_stage == 3):
                if self.world.rank == 0:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return weights

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of what this rank saves of the optimizer's state (pretrain/state.py)."""
        return snapshot(self._optimizer.partition, self._optimizer.state)

    def load(self, folder: Path, updates_taken: int) -> None:
        """Reads the optimizer's state from a checkpoint of any number of ranks and ZeRO stage.

        The engine was built with the parameters of the same checkpoint.
        """
        self.updates_taken = updates_taken
        self._optimizer.create_state(updates_taken)
        if updates_taken:
            read_shards(folder / ENGINE_FOLDER, self._optimizer.partition, self._optimizer.state)

    def close(self) -> None:
        """Lets go of DeepSpeed's memory, so that another engine can have it."""
        self._engine.destroy()

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        batch = batch.to(self.device)
        return self._engine(batch.tokens, batch.labels, batch.cu_seqlens)

    def _reduced_grad_norm(self) -> Tensor:
        grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(grads)

    def _on_host(self, norms: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """The sum of the update's losses, and `norms` on the CPU: where the host waits."""
        on_device = [self._loss_sum, *norms]
        values = torch.stack([x.double().to(self.device) for x in on_device]).tolist()
        return values[0], [
            torch.tensor(v, dtype=n.dtype) for v, n in zip(values[1:], norms, strict=True)
        ]

    def _read_norms_once(self) -> None:
        """Gives DeepSpeed the norms that its step asks for on the CPU, together with our loss, so
        that its own looks at them (are they finite? clip?) do not make the host wait again."""
        optimizer = self._engine.optimizer
        if self._zero_stage == 3:
            norms_of_groups = optimizer._get_norm_groups

            def norm_groups() -> list[Tensor]:
                loss_sum, norms = self._on_host(norms_of_groups())
                self._when_read(loss_sum)
                return norms

            optimizer._get_norm_groups = norm_groups
        elif self._zero_stage:
            global_norm = optimizer.scaled_global_norm

            def norm(*args: Any, **kwargs: Any) -> Tensor:
                loss_sum, (value,) = self._on_host([global_norm(*args, **kwargs)])
                self._when_read(loss_sum)
                return value

            optimizer.scaled_global_norm = norm
        else:
            parameters = list(self._engine.module.parameters())
            # DeepSpeed's own makes two tensors on the host, for each of which the device waits.
            self._engine.clip_fp32_gradients = lambda: nn.utils.clip_grad_norm_(
                parameters, self._clip_norm
            )


def _mask_not_finite(norm: Tensor, device: Any = None, val: float = -1.0) -> None:
    norm.masked_fill_(~norm.isfinite(), val)


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for a kind of device; late, since it takes seconds and guesses one."""
    os.environ["DS_ACCELERATOR"] = device.type
    # Names that torch is about to give up and DeepSpeed still uses, at every ZeRO-3 gather.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
    # Ours is AdamW with a guard around it; what DeepSpeed tests for is the name of the class.
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: "untested optimizer" not in record.getMessage()
    )
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2

    # The same without a tensor that is made on the host, for which the device would wait.
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mask_not_finite
    if device.type == "cpu":
        # An all-reduce for inference, which g++ would compile for minutes at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
