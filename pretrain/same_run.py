"""May a run go on from a checkpoint? Every difference that matters, with both values.

Free to change: whatever decides speed, memory or what is written, so too the number of ranks, the
ZeRO stage and the cut into micro-batches. Lawful with checkpoint.allow_changed: what changes the
training from here on but leaves model, data and batches what they are. All else is another run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_prep.shards import Manifest, read_manifest
from pretrain.config import RunConfig
from pretrain.schedule import learning_rate

_FREE = (
    "run_dir",
    "data.dataset",  # compared by content
    "data.loader_threads",
    "data.remote",
    "data.cache_bytes",
    "data.damaged_shards",
    "batch.micro_batch_rows",
    "validation",
    "checkpoint",
    "logging",
    "profile",
    "health.hang_seconds",
    "health.compile_seconds",
    "parallel.device",
    "parallel.zero_stage",
    "parallel.activation_checkpointing",
    "parallel.offload_optimizer",
    "parallel.compile",
    "parallel.reduce_bucket_mb",
    "training.loss_chunk_tokens",
    "training.time_limit_minutes",
    "training.branch_from",
    "training.total_steps",  # compared by the learning rates, as are the next two
    "schedule",
    "optimizer.peak_lr",
)
_LAWFUL = ("optimizer", "schedule", "training", "health", "parallel.precision")
_UNLAWFUL = ("optimizer.kind",)  # the state would be another


def dataset_facts(config: RunConfig, manifest: Manifest) -> dict[str, Any]:
    """What decides the training rows, wherever the data sets lie."""
    mixed = [read_manifest(other.dataset) for other in config.data.mixed_with]
    return {
        "kind": manifest.kind,
        "row_tokens": manifest.row_tokens,
        "vocab_size": manifest.vocab_size,
        "train_rows": manifest.splits["train"].rows,
        "train_index_sha256": manifest.splits["train"].index_sha256,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "mixed_with_index_sha256": [other.splits["train"].index_sha256 for other in mixed] or None,
    }


def refuse_other_run(
    facts: Mapping[str, Any], config: RunConfig, manifest: Manifest, folder: Path
) -> None:
    """Raises ValueError if going on from `folder` would not continue the same run."""
    try:
        checkpoint = RunConfig.model_validate(facts["config"])
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{folder} holds settings of another version: got {name}: {first['msg']}; expected "
            "those of this one; use the version that wrote it, or another run_dir"
        ) from None
    old = leaves(checkpoint.model_dump(mode="json"))
    new = leaves(config.model_dump(mode="json"))
    changed = {
        name: f"{name}: checkpoint: {old.get(name)}, now: {new.get(name)}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name) and not _is_in(name, _FREE)
    }
    old_data = facts["dataset"]
    changed |= {
        f"data set's {name}": f"data set's {name}: checkpoint: {old_data.get(name)}, now: {value}"
        for name, value in dataset_facts(config, manifest).items()
        if old_data.get(name) != value
    }
    changed |= _other_learning_rates(facts["step"], checkpoint, config)
    left = {
        n: text for n, text in changed.items() if not (_is_lawful(n) and _is_allowed(n, config))
    }
    if not left:
        return
    lawful = ",".join(name for name in left if _is_lawful(name))
    if folder == config.training.branch_from:
        what = f"training.branch_from is of a run with other settings: got {folder}: "
        remedy = "; choose another checkpoint or take these back"
    else:
        what = f"{config.run_dir} holds a run with other settings ({folder.name}): "
        remedy = "; choose another run_dir or take these back"
    raise ValueError(
        what
        + "; ".join(left.values())
        + remedy
        + (f", or allow what may change: checkpoint.allow_changed=[{lawful}]" if lawful else "")
    )


def _other_learning_rates(done: int, old: RunConfig, new: RunConfig) -> dict[str, str]:
    """Length and schedule may change while no step taken so far would have another rate."""
    total = new.training.total_steps
    if total < done:
        # Not to be allowed: what the checkpoint holds lies beyond the end of the run.
        return {"total": f"training.total_steps: checkpoint is at step {done}, now: {total}"}
    for step in range(1, done + 1):
        before = learning_rate(step, old.schedule, old.optimizer.peak_lr, old.training.total_steps)
        if before != learning_rate(step, new.schedule, new.optimizer.peak_lr, total):
            names = ("schedule", "training.total_steps", "optimizer.peak_lr")
            a, b = leaves(old.model_dump(mode="json")), leaves(new.model_dump(mode="json"))
            return {
                name: f"{name}: checkpoint: {a[name]}, now: {b[name]}"
                for name in a
                if _is_in(name, names) and a[name] != b[name]
            }
    return {}


def _is_in(name: str, names: tuple[str, ...]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in names)


def _is_lawful(name: str) -> bool:
    return _is_in(name, _LAWFUL) and not _is_in(name, _UNLAWFUL)


def _is_allowed(name: str, config: RunConfig) -> bool:
    return _is_in(name, config.checkpoint.allow_changed)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
