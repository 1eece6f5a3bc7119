"""How fast one model trains at one length, on one device: what `python -m pretrain bench` times.

The loop is the one of `train`, engine, loader threads and all, over rows of random tokens. A peer
of another code base has a loop of its own, without DeepSpeed, in bf16, with torch's fused AdamW.
"""

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from data_prep.shards import Row
from models.accounting import flops_per_token, parameter_count
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain.config import RunConfig
from pretrain.data import AnyRows, MicroBatch, training_batches
from pretrain.distributed import World
from pretrain.engine import Engine
from pretrain.health import Health
from pretrain.kernel_kinds import seconds_by_kind
from pretrain.loss import SummedLoss
from pretrain.metrics import peak_flops, peak_memory_bytes
from pretrain.timing import StepClock

WARMUP = 3
"""Updates that are not timed: kernels are compiled, buffers allocated."""
OUR = "fenwick"

Update = Callable[[Sequence[MicroBatch]], Any]


@dataclass(frozen=True)
class Sizes:
    """Of one measurement; tokens are those of one device.

    micro_batch_tokens: of one forward pass, or one row where rows are longer.
    """

    seq_len: int
    batch_tokens: int
    micro_batch_tokens: int
    updates: int
    checkpointing: str

    @property
    def micro_batch_rows(self) -> int:
        return max(1, self.micro_batch_tokens // self.seq_len)

    @property
    def batch_rows(self) -> int:
        """At least one micro-batch of whole rows."""
        micro_batches = max(1, self.batch_tokens // (self.micro_batch_rows * self.seq_len))
        return micro_batches * self.micro_batch_rows


class RandomRows:
    """Rows of random tokens, one document each; as many as anybody asks for."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Row:
        random = np.random.default_rng(index)
        tokens = random.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int64)
        return Row(tokens[:-1].copy(), tokens[1:].copy(), np.zeros(1, dtype=np.int64))

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        return np.arange(len(self))


def bench_config(config: RunConfig, mixer: str | None, sizes: Sizes) -> RunConfig:
    """The run with another mixer, length, batch and checkpointing; levels for the length."""
    tree = config.model_dump(mode="json")
    tree["model"]["max_seq_len"] = max(sizes.seq_len, config.model.max_seq_len)
    if mixer is not None:
        tree["model"]["mixer"] = mixer
    tree["data"] |= {"seq_len": sizes.seq_len}
    tree["batch"] = {
        "batch_tokens": sizes.batch_rows * sizes.seq_len,
        "micro_batch_rows": sizes.micro_batch_rows,
    }
    tree["parallel"]["activation_checkpointing"] = sizes.checkpointing
    tree["training"]["total_steps"] = WARMUP + sizes.updates + 1
    tree["schedule"] = {"kind": "constant"}
    tree["validation"] = {"every_steps": None}
    return RunConfig.model_validate(tree)


def measure(
    config: RunConfig, peer: str, sizes: Sizes, world: World, device: torch.device
) -> dict[str, Any]:
    """Times updates of a model.

    Args:
        config: of `bench_config`.
        peer: "fenwick", or a code base that models/fla_peer.py knows.

    Returns:
        tokens_per_second, seconds of an update (data, forward, backward, step and all), mfu (null
        where the device's peak is not known), peak_bytes, kinds: device seconds of one update by
        kind of kernel, kernels: the largest of them.

    Raises:
        torch.OutOfMemoryError: it does not fit.
        ValueError: the peer has no such model, or is not installed.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    clock, update, close = _updater(config, peer, world, device)
    rows = cast(AnyRows, RandomRows(sizes.seq_len, config.model.vocab_size))
    batches = training_batches(rows, config, world.rank, world.size, first_update=0)
    try:
        return _timed(config, peer, sizes, clock, update, batches, device)
    finally:
        batches.close()  # type: ignore[attr-defined]  # it is a generator
        close()
        gc.collect()


def _timed(
    config: RunConfig,
    peer: str,
    sizes: Sizes,
    clock: StepClock,
    update: Update,
    batches: Iterator[list[MicroBatch]],
    device: torch.device,
) -> dict[str, Any]:
    for _ in range(WARMUP):
        update(next(batches))
    _wait(device)
    clock.read()
    began = time.perf_counter()
    for _ in range(sizes.updates):
        asked = time.perf_counter()
        micro_batches = next(batches)
        clock.add("data", time.perf_counter() - asked)
        update(micro_batches)
    _wait(device)
    seconds = (time.perf_counter() - began) / sizes.updates
    phases = {name: total / sizes.updates for name, total in clock.read().items()}
    peak_bytes = peak_memory_bytes(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        update(next(batches))
        _wait(device)
    kinds, kernels = seconds_by_kind(recorded.key_averages(), device.type)
    tokens = sizes.batch_rows * sizes.seq_len
    peak = peak_flops(device)
    flops = flops_per_token(config.model, sizes.seq_len)
    return {
        "peer": peer,
        "mixer": config.model.mixer,
        "parameters": parameter_count(config.model),
        "seq_len": sizes.seq_len,
        "batch_tokens": tokens,
        "micro_batch_rows": sizes.micro_batch_rows,
        "checkpointing": sizes.checkpointing,
        "tokens_per_second": tokens / seconds,
        "seconds": {"all": seconds, **phases},
        "mfu": tokens / seconds * flops / peak if peak else None,
        "peak_bytes": peak_bytes,
        "kinds": kinds,
        "kernels": kernels,
    }


def _updater(
    config: RunConfig, peer: str, world: World, device: torch.device
) -> tuple[StepClock, Update, Callable[[], None]]:
    """A clock, what does an update, and what frees its memory."""
    if peer == OUR:
        model = LanguageModel(config.model)
        initialize(model, config.seed)
        engine = Engine(model, config, world, device)
        health = Health(config.health)

        def ours(batches: Sequence[MicroBatch]) -> None:
            engine.update(batches, config.optimizer.peak_lr, health)

        return engine.clock, ours, engine.close
    from models.fla_peer import fla_model

    return _plain(fla_model(config.model).to(device, torch.bfloat16), config, device)


def _plain(
    model: nn.Module, config: RunConfig, device: torch.device
) -> tuple[StepClock, Update, Callable[[], None]]:
    """A bare loop for a model of another code base."""
    chunk = config.training.loss_chunk_tokens
    module = SummedLoss(model, device, config.parallel.precision, 0.0, chunk)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.peak_lr, settings.betas, settings.eps, fused=True
    )
    clock = StepClock(device)

    def update(batches: Sequence[MicroBatch]) -> None:
        valid = sum(batch.valid_tokens for batch in batches)
        for batch in batches:
            moved = batch.to(device)
            with clock.phase("forward"):
                objective, _ = module(moved.tokens, moved.labels, moved.cu_seqlens)
            with clock.phase("backward"):
                (objective / valid).backward()
        with clock.phase("step"):
            if settings.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return clock, update, lambda: None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limit_memory(gib: float, device: torch.device) -> None:
    """Gives this process at most so much memory of its device."""
    size = int(gib * 2**30)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
