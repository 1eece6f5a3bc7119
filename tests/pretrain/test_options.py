"""Settings that trade memory for time change nothing but rounding; Muon; batch stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Muon

from data_prep.training_rows import TrainingRows
from models.initialize import initialize
from models.language_model import LanguageModel
from models.parameter_groups import is_hidden_matrix
from pretrain import blocks
from pretrain.batch_plan import BatchPlan
from pretrain.config import RunConfig, check_data, load_config
from pretrain.data import training_batches
from pretrain.distributed import World
from pretrain.engine import Engine
from pretrain.health import Health

CPU = torch.device("cpu")


def train(settings: dict[str, Any], world: World, updates: int = 3) -> tuple[Engine, list[float]]:
    """An engine after some updates, and their losses and gradient norms."""
    config = RunConfig.model_validate(settings)
    model = LanguageModel(config.model)
    initialize(model, config.seed)
    engine = Engine(model, config, world, CPU)
    rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
    batches = training_batches(rows, config, 0, 1, first_update=0)
    numbers = []
    for _ in range(updates):
        update = engine.update(next(batches), 1e-2, Health(config.health), with_group_norms=True)
        numbers += [update.loss, update.grad_norm, *update.group_norms.values()]
    return engine, numbers


@pytest.mark.parametrize(
    ("stage", "option"),
    [
        (0, {"activation_checkpointing": "full"}),
        (2, {"activation_checkpointing": "selective"}),
        (3, {"activation_checkpointing": "full"}),
        (3, {"activation_checkpointing": "selective"}),
        (1, {"offload_optimizer": True}),
        (2, {"offload_optimizer": True}),
        (3, {"offload_optimizer": True}),
        (2, {"reduce_bucket_mb": 0.01}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_option_changes_no_number(
    settings: dict[str, Any], world: World, stage: int, option: dict[str, Any], precision: str
) -> None:
    settings["parallel"] |= {"zero_stage": 0, "precision": precision}
    _, expected = train(settings, world)
    settings["parallel"] |= {"zero_stage": stage} | option
    _, found = train(settings, world)
    assert found == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 1e-2)


def test_untied_output_matrix_trains_at_every_stage(settings: dict[str, Any], world: World) -> None:
    settings["model"]["tie_embeddings"] = False
    results = []
    for stage in (0, 3):
        settings["parallel"]["zero_stage"] = stage
        results.append(train(settings, world)[1])
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_compiled_blocks_give_the_same_numbers(
    settings: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        """Runs what was traced as it is: generating C++ for it takes minutes on a CPU."""
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(blocks, "compile_fx", backend)
    settings["model"] |= {"num_layers": 1, "mixer": "attention", "attention": {"num_heads": 2}}
    _, expected = train(settings, world)
    settings["parallel"] |= {"zero_stage": 1, "compile": True}
    _, found = train(settings, world)
    assert found == pytest.approx(expected, rel=1e-4)
    assert traced


def test_compiled_code_gets_aligned_inputs_and_parameters_their_gradients() -> None:
    """ZeRO's parameters begin anywhere in one long buffer."""
    buffer = torch.arange(20.0)
    assert buffer.data_ptr() % blocks.VECTOR_BYTES == 0
    odd = buffer[3:7].requires_grad_()
    even = buffer[8:12].requires_grad_()
    seen = []

    def compiled(*inputs: Any) -> Any:
        seen.extend(inputs)
        return inputs[0] * inputs[1] * inputs[2]

    result = blocks.with_aligned_inputs(compiled)(odd, even, 2)
    assert all(x.data_ptr() % blocks.VECTOR_BYTES == 0 for x in seen[:2])
    assert seen[1] is even
    assert seen[2] == 2
    result.sum().backward()
    assert odd.grad is not None
    assert torch.equal(odd.grad, 2 * even.detach())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_muon_is_torch_s_on_hidden_matrices(
    settings: dict[str, Any], world: World, stage: int
) -> None:
    settings["optimizer"] |= {"kind": "muon", "clip_norm": None, "weight_decay": 0.3}
    settings["parallel"]["zero_stage"] = stage
    config = RunConfig.model_validate(settings)
    engine, _ = train(settings, world, updates=2)
    trained = engine.full_weights()
    model = LanguageModel(config.model)
    initialize(model, config.seed)
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if is_hidden_matrix(name)]
    assert len(hidden) > 10
    muon = Muon(hidden, 1e-2, 0.3, adjust_lr_fn="match_rms_adamw")
    rest = [p for name, p in named.items() if not is_hidden_matrix(name)]
    adamw = torch.optim.AdamW(rest, 1e-2, (0.9, 0.95), weight_decay=0.0)
    decayed = {"embedding.weight"} | {name for name in named if name.endswith("conv.weight")}
    adamw.param_groups.clear()
    for decay, names in ((0.3, decayed), (0.0, named.keys() - decayed)):
        parameters = [named[n] for n in sorted(names) if not is_hidden_matrix(n)]
        adamw.add_param_group({"params": parameters, "weight_decay": decay})
    rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
    batches = training_batches(rows, config, 0, 1, first_update=0)
    for _ in range(2):
        micro_batches = next(batches)
        model.zero_grad()
        for batch in micro_batches:
            logits = model(batch.tokens, cu_seqlens=batch.cu_seqlens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
            (loss / sum(b.valid_tokens for b in micro_batches)).backward()
        muon.step()
        adamw.step()
    for name, parameter in named.items():
        # Newton-Schulz is in bf16: rounding of its input may show in the third digit.
        torch.testing.assert_close(
            trained[name], parameter.detach(), rtol=2e-2, atol=2e-3, msg=name
        )


def test_muon_is_sharded_over_ranks_and_resumes_at_another_stage(
    settings: dict[str, Any], write_config: Any, run_ranks: Any, read_log: Any
) -> None:
    settings["optimizer"] |= {"kind": "muon"}
    settings["training"]["total_steps"] = 6
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    unbroken = run_dir.with_name("unbroken")
    assert run_ranks(config, f"run_dir={unbroken}").exit_codes == [0]
    strike = ("pretrain.engine", "Engine.update", 5, "before")
    run_ranks(config, "parallel.zero_stage=2", ranks=2, strike=strike)
    finished = run_ranks(config, "parallel.zero_stage=3", ranks=2)
    assert finished.exit_codes == [0, 0], finished.output
    for line, expected in zip(read_log(run_dir), read_log(unbroken), strict=True):
        if "loss" in line:
            assert line["loss"] == pytest.approx(expected["loss"], rel=2e-3)


def staged(settings: dict[str, Any]) -> RunConfig:
    settings["batch"] |= {
        "batch_tokens": 256,
        "stages": [
            {"until_step": 2, "batch_tokens": 64, "seq_len": 8},
            {"until_step": 5, "batch_tokens": 128, "seq_len": 16},
            {"until_step": 6},
        ],
    }
    return RunConfig.model_validate(settings)


def test_stages_say_how_large_every_update_is(settings: dict[str, Any]) -> None:
    plan = BatchPlan(staged(settings))
    assert [plan.tokens(step) for step in range(1, 9)] == [64, 64, 128, 128, 128, 256, 256, 256]
    assert [plan.stage(step).seq_len for step in range(1, 9)] == [8, 8, 16, 16, 16, 32, 32, 32]
    firsts = [plan.first_row(step) for step in range(1, 9)]
    assert firsts == [sum(plan.rows(s) for s in range(1, step)) for step in range(1, 9)]
    assert plan.tokens_until(8) == 64 * 2 + 128 * 3 + 256 * 3


def test_stages_read_the_same_rows_in_the_same_order_cut_shorter(
    settings: dict[str, Any], dataset: Path
) -> None:
    rows = TrainingRows(dataset, "train", 32)
    plain = RunConfig.model_validate(settings)
    whole = [b.tokens for u in training_batches(rows, plain, 0, 1, 0) for b in u]
    config = staged(settings)
    updates = list(training_batches(rows, config, 0, 1, 0))
    assert [u[0].tokens.shape for u in updates[:8:2]] == [(4, 8), (2, 16), (2, 16), (1, 32)]
    cut = torch.cat([b.tokens.flatten() for u in updates for b in u])
    expected = torch.cat([tokens.flatten() for tokens in whole])
    assert cut[: len(expected)].equal(expected)
    for update in updates[:5]:
        for batch in update:
            if batch.cu_seqlens is not None:
                T = batch.tokens.shape[1]
                assert set(range(0, batch.tokens.numel(), T)) <= set(batch.cu_seqlens.tolist())
    per_rank = [list(training_batches(rows, config, rank, 2, 0)) for rank in (0, 1)]
    for step, update in enumerate(updates):
        both = torch.cat([b.tokens for ranks in per_rank for b in ranks[step]])
        assert both.equal(torch.cat([b.tokens for b in update]))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"until_step": 2, "seq_len": 12}], "seq_len does not divide data.seq_len: got 12"),
        ([{"until_step": 2}, {"until_step": 2}], "until_step to rise from stage to stage"),
        ([{"until_step": 2, "batch_tokens": 48}], "batch_tokens of batch.stages does not split"),
    ],
)
def test_wrong_stages_are_refused(
    settings: dict[str, Any], write_config: Any, stages: list[Any], words: str
) -> None:
    settings["batch"]["stages"] = stages
    with pytest.raises(ValueError, match=words):
        load_config(write_config(settings))


def test_stages_must_split_over_the_ranks_too(settings: dict[str, Any]) -> None:
    from data_prep.shards import read_manifest

    settings["batch"]["stages"] = [{"until_step": 2, "batch_tokens": 32}]
    config = RunConfig.model_validate(settings)
    with pytest.raises(ValueError, match="batch_tokens of batch.stages .* 32 . 1 . 2 = 64"):
        check_data(config, read_manifest(config.data.dataset), 2)


def test_staged_run_resumes_inside_a_stage_on_other_ranks(
    settings: dict[str, Any], write_config: Any, run_ranks: Any, read_log: Any
) -> None:
    staged(settings)
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    unbroken = run_dir.with_name("unbroken")
    assert run_ranks(config, f"run_dir={unbroken}").exit_codes == [0]
    strike = ("pretrain.engine", "Engine.update", 5, "before")
    run_ranks(config, strike=strike)
    assert run_ranks(config, ranks=2).exit_codes == [0, 0]
    for line, expected in zip(read_log(run_dir), read_log(unbroken), strict=True):
        assert line.get("rows") == expected.get("rows")
        assert line.get("seq_len") == expected.get("seq_len")
        assert line.get("tokens") == expected.get("tokens")
        if "loss" in line:
            assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
