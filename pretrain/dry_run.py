"""python -m pretrain CONFIG --dry-run: everything a run will be, without starting any of it."""

import os

from rich.console import Console

from models.accounting import flops_per_token, parameter_count
from pretrain import checkpoint
from pretrain.batch_plan import BatchPlan
from pretrain.config import RunConfig, checked_manifest
from pretrain.data import training_rows
from pretrain.memory import activation_bytes, memory_bytes, moments_per_parameter
from pretrain.plan import plan_lines

UNITS = {"GiB": 2**30, "MiB": 2**20}


def print_dry_run(config: RunConfig, ranks: int, console: Console) -> None:
    """Prints what the run would be on `ranks` GPUs; reads the data set's manifest, writes nothing.

    Raises:
        FileNotFoundError, ValueError: the run would be refused, and why.
    """
    manifest = checked_manifest(config, ranks)
    start = checkpoint.find_start(config, manifest)
    split = manifest.splits["train"]
    num_rows = len(training_rows(config.data))
    for line in plan_lines(config, num_rows, ranks, config.parallel.device):
        console.print(line)
    identity = manifest.tokenizer_sha256 or "none"
    console.print(
        f"reads {config.data.dataset} ({manifest.kind}): {split.documents:,} documents, "
        f"{split.tokens:,} tokens, tokenizer {identity[:16]}, index {split.index_sha256[:16]}"
    )
    where = f"step {start.step} of {start.folder}" if start.folder else "new parameters"
    total = config.training.total_steps
    console.print(f"starts from {where}; {total - start.step:,} of {total:,} updates to go")
    for line in (*work_lines(config), *checkpoint_lines(config), *memory_lines(config, ranks)):
        console.print(line)


def work_lines(config: RunConfig) -> list[str]:
    """FLOPs of the whole run."""
    plan, total = BatchPlan(config), config.training.total_steps
    flops = 0.0
    for stage in plan.stages:
        updates = max(0, min(stage.last, total) - stage.first + 1)
        tokens = updates * stage.rows * config.data.seq_len
        flops += tokens * flops_per_token(config.model, stage.seq_len)
    per_token = flops_per_token(config.model, config.data.seq_len)
    hours = flops / (0.4 * 989e12) / 3600
    return [
        f"{flops:.3e} FLOPs in {plan.tokens_until(total):,} tokens, {per_token:.3e} a token at "
        f"{config.data.seq_len}; {_time(hours)} of one H100 at 40 % of its bf16 peak"
    ]


def checkpoint_lines(config: RunConfig) -> list[str]:
    """How many checkpoints, of which size."""
    settings, total = config.checkpoint, config.training.total_steps
    written = total // settings.every_steps + (total % settings.every_steps > 0)
    stay = written if settings.keep_last is None else min(settings.keep_last, written)
    if settings.keep_last is not None and settings.keep_every_steps is not None:
        every = max(settings.keep_every_steps, settings.every_steps)
        stay = min(written, stay + total // every)
    size = 4 * (1 + moments_per_parameter(config)) * parameter_count(config.model)  # fp32
    room = stay + 1  # the next one is complete before one is removed
    return [
        f"{written:,} checkpoints of {_size(size)}, {stay:,} stay; needs room for "
        f"{_size(room * size)} in {config.run_dir}"
    ]


def memory_lines(config: RunConfig, ranks: int) -> list[str]:
    """A table of memory by ZeRO stage."""
    activations = activation_bytes(config)
    tables = {s: memory_bytes(config, ranks, s, activations) for s in (0, 1, 2, 3)}
    kinds = list(tables[0])
    unit = _unit(max(sum(table.values()) for table in tables.values()))
    lines = [
        f"memory of each of {ranks} GPUs in {unit}, estimated (CUDA itself: about 0.5 GiB more)",
        "ZeRO  " + "".join(f"{kind:>13}" for kind in kinds) + f"{'all':>9}",
    ]
    for stage, table in tables.items():
        numbers = "".join(f"{table[kind] / UNITS[unit]:>13.2f}" for kind in kinds)
        chosen = "  <- set" if stage == config.parallel.zero_stage else ""
        lines.append(f"{stage:<6}{numbers}{sum(table.values()) / UNITS[unit]:>9.2f}{chosen}")
    return lines


def _unit(size: float) -> str:
    return "GiB" if size >= UNITS["GiB"] else "MiB"


def _size(size: float) -> str:
    unit = _unit(size)
    return f"{size / UNITS[unit]:.2f} {unit}"


def _time(hours: float) -> str:
    if hours < 1:
        return f"{3600 * hours:.2g} seconds"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"


def ranks_of_environment() -> int:
    """What a launcher has set, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))
