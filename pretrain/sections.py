"""The sections of a run's settings beside `model` and `data`, each with its unit and its rule.

pretrain/config.py joins them into RunConfig and checks what spans sections. No torch is imported,
so that launchers can read a config quickly.
"""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BatchStage(Section):
    """Smaller batches or shorter rows at the start of a run, up to a step."""

    until_step: int = Field(ge=1)
    """The last update of this stage."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one update over all ranks; null: batch.batch_tokens."""
    seq_len: int | None = Field(default=None, ge=2)
    """Tokens in a row, a divisor of data.seq_len, whose rows are cut; null: data.seq_len."""


class BatchConfig(Section):
    """How many tokens make one update; the number of accumulated micro-batches follows from it."""

    batch_tokens: int = Field(ge=1)
    """Tokens in one update over all ranks: a multiple of seq_len * micro_batch_rows * ranks."""
    micro_batch_rows: int = Field(ge=1)
    """Rows of data.seq_len in one pass of one rank; changes memory and speed, the result only by
    rounding.
    """
    stages: tuple[BatchStage, ...] = ()
    """Batch ramp and sequence-length curriculum: stages in order, each up to its until_step; after
    the last one batch_tokens and data.seq_len hold.
    """

    @field_validator("stages")
    @classmethod
    def _stages_are_in_order(cls, stages: tuple[BatchStage, ...]) -> tuple[BatchStage, ...]:
        ends = [stage.until_step for stage in stages]
        if any(end <= before for before, end in zip(ends, ends[1:], strict=False)):
            raise ValueError(f"expected until_step to rise from stage to stage: got {ends}")
        return stages


class OptimizerConfig(Section):
    """The optimizer and gradient clipping (pretrain/optimizer.py has the equations)."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: hidden matrices by Muon, everything else by AdamW."""
    peak_lr: float = Field(gt=0)
    """Learning rate after the warmup; muon's updates are scaled so that the same value serves."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon only: of the gradient, Nesterov's form."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of the parameters that are classed for it
    (models/parameter_groups.py).
    """
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it. null: no clipping."""

    @field_validator("betas")
    @classmethod
    def _betas_are_averages(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("expected two numbers in [0, 1)")
        return betas


class ScheduleConfig(Section):
    """Learning rate against the step (pretrain/schedule.py has the equations)."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly to optimizer.peak_lr."""
    decay_steps: int | None = Field(default=None, ge=1)
    """wsd only: updates at the end of the run over which the learning rate falls linearly."""
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """cosine and wsd: learning rate of the last update, as a fraction of optimizer.peak_lr."""

    @model_validator(mode="after")
    def _decay_steps_belong_to_wsd(self) -> "ScheduleConfig":
        if self.kind == "wsd" and self.decay_steps is None:
            raise ValueError("schedule.decay_steps is missing: schedule.kind wsd needs it")
        if self.kind != "wsd" and self.decay_steps is not None:
            raise ValueError(
                f"schedule.decay_steps acts on schedule.kind wsd only: got kind {self.kind}; "
                "leave it out"
            )
        return self


class ParallelConfig(Section):
    """How the work is spread, in which precision it is computed, what is kept in memory."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO: 0 copies everything, 1 shards optimizer state, 2 also gradients, 3 also
    parameters. May change when a run goes on.
    """
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the matrix products. Parameters, gradients, their reduction and the optimizer are fp32 in
    both.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: nothing; all of a block but matrix products and
    operators; all of a block.
    """
    offload_optimizer: bool = False
    """Keep optimizer state in the memory of the CPU, and update there; zero_stage 1 to 3."""
    compile: bool = False
    """torch.compile of every block; zero_stage 0 to 2."""
    reduce_bucket_mb: float = Field(default=512, gt=0)
    """Size of the buffer in which ZeRO collects gradients for one reduction, in MiB."""

    @model_validator(mode="after")
    def _stage_fits(self) -> "ParallelConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "parallel.offload_optimizer needs sharded optimizer state: got zero_stage 0; "
                "expected 1, 2 or 3; raise it or set offload_optimizer=false"
            )
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "parallel.compile cannot trace parameters that come and go: got zero_stage 3; "
                "expected 0, 1 or 2; lower it or set compile=false"
            )
        return self


class TrainingConfig(Section):
    """The length of the run, and its loss."""

    total_steps: int = Field(ge=1)
    """Updates until the run is complete."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of mean(log(sum(exp(logits)))^2), which keeps logits small; in the gradient, not in
    the reported loss.
    """
    loss_chunk_tokens: int = Field(default=4096, ge=1)
    """Tokens whose logits exist at the same time; the result changes only by rounding."""
    time_limit_minutes: float | None = Field(default=None, gt=0)
    """Wall clock of one start of the command: the run then saves and ends with exit code 142, to be
    started again. Leave room for one update and one save.
    """
    branch_from: Path | None = None
    """A step folder of another run that this one starts from, optimizer state and data position
    included; for example to try a wsd decay from the middle of a run.
    """


class ValidationConfig(Section):
    """Loss on the validation split during training."""

    every_steps: int | None = Field(default=None, ge=1)
    """Updates between validations, which also take place after the last one. null: none."""
    rows: int = Field(default=64, ge=1)
    """Rows of seq_len tokens, spread evenly over the validation split; all if it has fewer."""


class CheckpointConfig(Section):
    """When training state is written, how much of it stays, and what may differ when it is read."""

    every_steps: int = Field(ge=1)
    """Updates between checkpoints; one is also written when a signal stops the run."""
    after_last: bool = True
    """Write one after the last update. false: for measurements, whose state nobody needs."""
    keep_last: int | None = Field(default=2, ge=1)
    """Complete checkpoints that stay; older ones are removed. null: all."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints of multiples of this step stay for good, beside the last ones."""
    background: bool = True
    """Write while training goes on, from a copy in CPU memory. false: training waits."""
    use_older: bool = True
    """Go on from an older checkpoint, with a warning, where the newest is damaged; else refuse."""
    allow_changed: tuple[str, ...] = ()
    """Settings that may differ from those of the checkpoint, by name (`optimizer.clip_norm`); only
    such that leave model, data and batch what they are.
    """


class HealthConfig(Section):
    """What happens to an update that looks wrong, and to a run that stands still."""

    max_consecutive_skips: int = Field(default=10, ge=1)
    """Updates in a row that may be skipped, for a loss or gradient that is not finite or for a
    spike, before the run stops.
    """
    spike_action: Literal["off", "log", "skip", "stop"] = "log"
    """What a loss far above the latest ones leads to; skip leaves parameters as they are."""
    spike_deviations: float = Field(default=6.0, gt=0)
    """How far above their mean, in standard deviations of the window."""
    spike_window: int = Field(default=128, ge=8)
    """Latest losses that a new one is compared with, once there are as many."""
    hang_seconds: float | None = Field(default=1800.0, gt=0)
    """Without progress for so long, every rank writes its stacks to RUN/stacks/ and ends with exit
    code 1. null: wait for ever.
    """
    compile_seconds: float = Field(default=3600.0, gt=0)
    """The same limit while a rank compiles kernels, and until the first update is done."""


class LoggingConfig(Section):
    """What appears on the screen and in TensorBoard; log.jsonl and curves get every step."""

    every_steps: int = Field(default=10, ge=1)
    """Updates between log lines, and between gradient norms of layer groups."""
    statistics_every_steps: int | None = Field(default=None, ge=1)
    """Updates between statistics of lambda per level and of decay, which cost one more forward
    pass of a row. null: none.
    """
    histograms: bool = False
    """Histograms of lambda and decay beside their statistics."""
    lambda_maps: bool = False
    """A heat map of lambda, level by token, beside the statistics."""
    wandb_project: str | None = Field(default=None, min_length=1)
    """Send the scalars to Weights & Biases too; needs `pip install wandb`."""


class ProfileConfig(Section):
    """A trace of some updates for chrome://tracing or Perfetto."""

    steps: str | None = None
    """First and last update, `10-12`; the trace is RUN/profile/. null: none."""

    @field_validator("steps", mode="before")
    @classmethod
    def _steps_are_a_range(cls, steps: Any) -> Any:
        if steps is not None:
            match = re.fullmatch(r"(\d+)-(\d+)", str(steps))
            if not match or not 1 <= int(match[1]) <= int(match[2]):
                raise ValueError("expected FIRST-LAST, for example 10-12")
        return steps

    @property
    def bounds(self) -> tuple[int, int] | None:
        """(first, last) update, counted from 1."""
        if self.steps is None:
            return None
        first, last = self.steps.split("-")
        return int(first), int(last)
