"""DeepSpeed as it is used: equal numbers for every split of the work, fp32 where promised."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from data_prep.shards import IGNORED_LABEL
from data_prep.training_rows import TrainingRows
from models.initialize import initialize
from models.language_model import LanguageModel
from models.parameter_groups import decays
from pretrain.config import RunConfig
from pretrain.data import MicroBatch, training_batches
from pretrain.distributed import World
from pretrain.engine import Engine, deepspeed_settings
from pretrain.errors import TrainingFailed
from pretrain.health import Health, Verdict
from pretrain.optimizer import build_optimizer
from pretrain.sections import HealthConfig, OptimizerConfig

ReadLog = Callable[[Path], list[dict[str, float]]]
CPU = torch.device("cpu")


def one_update(settings: dict[str, Any], world: World) -> tuple[Engine, Any]:
    config = RunConfig.model_validate(settings)
    model = LanguageModel(config.model)
    initialize(model, config.seed)
    engine = Engine(model, config, world, CPU)
    rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
    batches = next(training_batches(rows, config, 0, 1, first_update=0))
    return engine, engine.update(batches, 1e-3, Health(config.health))


@pytest.mark.parametrize("stage", [0, 2])
def test_an_update_without_a_label_that_counts_is_skipped(
    settings: dict[str, Any], world: World, stage: int
) -> None:
    settings["parallel"]["zero_stage"] = stage
    engine, _ = one_update(settings, world)
    before = engine.full_weights()
    row = torch.ones(1, 32, dtype=torch.long)
    empty = MicroBatch(row, torch.full_like(row, IGNORED_LABEL), cu_seqlens=None)
    health = Health(HealthConfig(max_consecutive_skips=2))
    update = engine.update([empty, empty], 1e-3, health)
    assert update.verdict is Verdict.SKIP_EMPTY
    assert math.isnan(update.loss)
    assert engine.updates_taken == 1
    after = engine.full_weights()
    assert all(before[name].equal(after[name]) for name in before)
    health.record(2, update.loss, update.grad_norm, update.verdict)
    with pytest.raises(TrainingFailed, match="step 3 has no label that counts: .* 2 updates"):
        health.record(3, update.loss, update.grad_norm, update.verdict)


SPLITS = {
    "1-rank-1x8": (1, 8, 0),
    "1-rank-8x1-zero1": (1, 1, 1),
    "2-ranks-2x2-zero2": (2, 2, 2),
}
SLOW_SPLITS = {
    f"{ranks}-ranks-{8 // (ranks * rows)}x{rows}-zero{stage}": (ranks, rows, stage)
    for ranks, rows, stage in [
        (1, 4, 0), (1, 2, 2), (1, 2, 3), (2, 2, 0), (2, 1, 1), (2, 1, 3),
        (4, 2, 0), (4, 1, 1), (4, 1, 2), (4, 2, 3),
    ]
}  # fmt: skip
"""(ranks, rows of a micro-batch, ZeRO stage) for an update of 8 rows."""


@pytest.fixture
def check_splits(
    settings: dict[str, Any], write_config: Any, run_ranks: Any, read_log: ReadLog
) -> Callable[[dict[str, tuple[int, int, int]]], None]:
    """Compares losses, gradient norms and trained weights of (ranks, micro rows, ZeRO stage)."""

    def check(splits: dict[str, tuple[int, int, int]]) -> None:
        # A large eps keeps AdamW from turning rounding of tiny gradients into full steps.
        settings["optimizer"] |= {"eps": 1e-3, "clip_norm": 0.5}
        settings["training"]["total_steps"] = 3
        settings["batch"]["batch_tokens"] = 256
        config = write_config(settings)
        results = {}
        for name, (ranks, rows, stage) in splits.items():
            run_dir = Path(settings["run_dir"]) / name
            changes = [f"run_dir={run_dir}", f"batch.micro_batch_rows={rows}"]
            finished = run_ranks(config, *changes, f"parallel.zero_stage={stage}", ranks=ranks)
            assert finished.exit_codes == [0] * ranks, finished.output
            weights = load_file(run_dir / "checkpoints/step-00000003/model.safetensors")
            results[name] = read_log(run_dir), weights
        log, weights = results.pop("1-rank-1x8")
        assert min(line["grad_norm"] for line in log if "grad_norm" in line) > 0.5  # clipping acts
        for name, (other_log, other_weights) in results.items():
            for line, other_line in zip(log, other_log, strict=True):
                assert other_line.pop("rows", None) == line.get("rows")
                expected = {key: value for key, value in line.items() if key != "rows"}
                assert other_line == pytest.approx(expected, rel=2e-6), name
            for key, tensor in weights.items():
                torch.testing.assert_close(
                    other_weights[key], tensor, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}"
                )

    return check


def test_micro_batches_ranks_and_zero_stages_give_the_same_loss_and_gradient(
    check_splits: Any,
) -> None:
    check_splits(SPLITS)


@pytest.mark.slow
def test_every_split_gives_the_same_loss_and_gradient(check_splits: Any) -> None:
    check_splits({"1-rank-1x8": (1, 8, 0)} | SLOW_SPLITS)


def test_loss_is_the_mean_over_valid_tokens_and_its_gradient_that_of_autograd(
    settings: dict[str, Any], world: World
) -> None:
    config = RunConfig.model_validate(settings)
    _, update = one_update(settings, world)
    model = LanguageModel(config.model)
    initialize(model, config.seed)
    rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
    batches = next(training_batches(rows, config, 0, 1, first_update=0))
    assert len({batch.valid_tokens for batch in batches}) > 1
    losses = [
        nn.functional.cross_entropy(
            model(batch.tokens, cu_seqlens=batch.cu_seqlens).flatten(0, 1),
            batch.labels.flatten(),
            reduction="none",
        )
        for batch in batches
    ]
    loss = torch.cat(losses).sum() / sum(batch.valid_tokens for batch in batches)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert update.loss == pytest.approx(loss.item(), rel=1e-6)
    assert update.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_computes_in_bf16_and_keeps_state_in_fp32(
    settings: dict[str, Any], world: World, stage: int
) -> None:
    settings["parallel"] |= {"zero_stage": stage, "precision": "bf16"}
    seen: set[torch.dtype] = set()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: (
            seen.add(output.dtype) if type(module).__name__ == "Linear" else None
        )
    )
    try:
        engine, update = one_update(settings, world)
    finally:
        hook.remove()
    settings["parallel"]["precision"] = "fp32"
    _, exact = one_update(settings, world)
    assert torch.bfloat16 in seen
    assert update.loss != exact.loss
    assert update.loss == pytest.approx(exact.loss, rel=5e-3)
    assert update.grad_norm == pytest.approx(exact.grad_norm, rel=5e-2)
    for name, parameter in engine._engine.module.named_parameters():
        assert parameter.dtype == torch.float32, name
    optimizer = engine._engine.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()  # ZeRO wraps ours
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert engine._engine.communication_data_type == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_run_of_two_ranks_trains_and_resumes_to_the_last_bit(
    settings: dict[str, Any], write_config: Any, run_ranks: Any, read_log: ReadLog, stage: int
) -> None:
    settings["parallel"] |= {"zero_stage": stage, "precision": "bf16"}
    settings["optimizer"]["peak_lr"] = 1e-2
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    unbroken = run_dir.with_name("unbroken")
    assert run_ranks(config, f"run_dir={unbroken}", ranks=2).exit_codes == [0, 0]
    run_ranks(config, ranks=2, strike=("pretrain.engine", "Engine.update", 6, "before"))
    assert run_ranks(config, ranks=2).exit_codes == [0, 0]
    assert read_log(run_dir) == read_log(unbroken)
    saved = [*run_dir.rglob("step-00000010/**/*.safetensors")]
    assert len(saved) == 3
    dtypes = {tensor.dtype for path in saved for tensor in load_file(path).values()}
    assert dtypes == {torch.float32}
    losses = [line["loss"] for line in read_log(unbroken) if "loss" in line]
    assert losses[-1] < losses[0] - 0.1


def test_weight_decay_acts_on_the_classed_parameters_only(settings: dict[str, Any]) -> None:
    config = RunConfig.model_validate(settings)
    with torch.device("meta"):
        model = LanguageModel(config.model)
    decay, no_decay = build_optimizer(model, OptimizerConfig(peak_lr=1.0)).param_groups
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    grouped = {id(p): group is decay for group in (decay, no_decay) for p in group["params"]}
    assert grouped == {id(p): decays(name) for name, p in model.named_parameters()}
    assert len(set(grouped.values())) == 2


def test_parameter_without_a_class_is_refused() -> None:
    model = nn.ParameterDict({"unheard_of": nn.Parameter(torch.zeros(2, 2))})
    with pytest.raises(ValueError, match="unheard_of"):
        build_optimizer(model, OptimizerConfig(peak_lr=1.0))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deepspeed_settings_follow_from_the_run(settings: dict[str, Any], ranks: int) -> None:
    settings["parallel"] |= {"reduce_bucket_mb": 0.01}
    derived = deepspeed_settings(RunConfig.model_validate(settings), ranks)
    assert derived["train_batch_size"] == ranks  # of one micro-batch: the engine ends updates
    assert derived["train_micro_batch_size_per_gpu"] == 1
    assert derived["gradient_clipping"] == 1.0
    assert derived["zero_optimization"]["stage"] == 0
    assert derived["zero_optimization"]["reduce_bucket_size"] == 2620
    settings["parallel"] |= {"reduce_bucket_mb": 512}
    whole = deepspeed_settings(RunConfig.model_validate(settings), ranks)
    assert whole["zero_optimization"]["reduce_bucket_size"] in (23088, 23089)
