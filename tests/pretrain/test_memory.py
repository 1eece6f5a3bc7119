"""What the memory of a run is estimated at, against what runs of small models allocate."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.dispatch import as_on_gpu, triton_interprets
from kernels.levels import num_levels
from kernels.log_linear_ssd import log_linear_ssd
from models.accounting import parameter_count, training_state_bytes
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain.blocks import prepare_blocks
from pretrain.config import RunConfig
from pretrain.distributed import World
from pretrain.engine import Engine
from pretrain.memory import HeldBytes, activation_bytes, memory_bytes

WriteConfig = Callable[[dict[str, Any]], Path]
CPU = torch.device("cpu")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_takes_the_memory_that_the_formula_says(
    settings: dict[str, Any], world: World, stage: int
) -> None:
    settings["parallel"]["zero_stage"] = stage
    config = RunConfig.model_validate(settings)
    engine = Engine(LanguageModel(config.model), config, world, CPU)
    optimizer = engine._optimizer
    optimizer.create_state(1)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for k, value in state.items()
        if k != "step"
    )
    masters = sum(holder.nbytes for holder in optimizer.partition.holders) if stage else 0
    expected = training_state_bytes(config.model, stage, ranks=1)
    assert moments == pytest.approx(expected["optimizer"], rel=0.02)  # but for padding
    assert masters == pytest.approx(expected["master copy"], rel=0.02)
    whole = 4 * parameter_count(config.model)
    shares = training_state_bytes(config.model, stage, ranks=4)
    assert shares["parameters"] == (whole if stage < 3 else whole / 4)
    assert shares["gradients"] == (whole if stage < 2 else whole / 4)
    assert shares["optimizer"] == (2 * whole if stage < 1 else whole / 2)


def test_activations_are_those_that_autograd_keeps(settings: dict[str, Any]) -> None:
    """Softmax attention runs the same operations on fake tensors and on real ones."""
    settings["model"] |= {"mixer": "attention", "attention": {"num_heads": 2}}
    config = RunConfig.model_validate(settings)
    model = LanguageModel(config.model)
    kept = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(1, 32, dtype=torch.int64)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logits = model(tokens)
    real = sum(size for pointer, size in kept.items() if pointer not in parameters)
    del logits
    # Beside it, the backward pass has gradients of its own.
    assert real < activation_bytes(config) < 1.3 * real


# In processes of their own: what other engines leave behind would be freed meanwhile.
PEAK = """
import os
from itertools import islice
from pathlib import Path
import torch
os.environ.update(environment)
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain.config import load_config
from pretrain.data import TrainingRows, training_batches
from pretrain.distributed import start_world, stop_world
from pretrain.engine import Engine, import_deepspeed
from pretrain.health import Health
from pretrain.memory import HeldBytes

cpu = torch.device("cpu")
world = start_world()
import_deepspeed(cpu)
config = load_config(path)
rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
updates = islice(training_batches(rows, config, world.rank, world.size, 0), 2)
with HeldBytes() as held:
    model = LanguageModel(config.model)
    initialize(model, 0)
    engine = Engine(model, config, world, cpu)
    for batches in updates:
        engine.update(batches, 1e-3, Health(config.health))
if world.rank == 0:
    Path(output).write_text(str(held.peak))
stop_world(world)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "mode", "ranks"),
    [
        (0, "bf16", "none", 1),
        (1, "fp32", "selective", 1),
        (2, "bf16", "full", 1),
        (3, "bf16", "full", 1),
        (3, "fp32", "none", 2),
    ],
)
def test_the_estimate_is_within_15_percent_of_what_is_allocated(
    settings: dict[str, Any],
    write_config: WriteConfig,
    tmp_path: Path,
    port: Callable[[], int],
    stage: int,
    precision: str,
    mode: str,
    ranks: int,
) -> None:
    """With softmax attention, which runs the same operations on a CPU as on a GPU."""
    settings["model"] |= {
        "vocab_size": 2048,
        "d_model": 256,
        "num_layers": 4,
        "mixer": "attention",
        "mlp": {"hidden_size": 512},
        "tie_embeddings": False,
        "attention": {"num_heads": 4},
    }
    settings["data"] |= {"seq_len": 64, "loader_threads": 0}
    settings["batch"] = {"batch_tokens": 2048 * ranks, "micro_batch_rows": 32}
    settings["training"] |= {"loss_chunk_tokens": 256}
    settings["parallel"] |= {
        "zero_stage": stage,
        "precision": precision,
        "activation_checkpointing": mode,
    }
    path, output = write_config(settings), tmp_path / "peak"
    context, address = multiprocessing.get_context("forkserver"), str(port())
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": address,
        }
        variables = {"path": path, "output": str(output), "environment": environment}
        processes.append(context.Process(target=exec, args=(PEAK, variables)))
        processes[-1].start()
    for process in processes:
        process.join(250)
        process.kill()
    assert output.is_file(), [process.exitcode for process in processes]
    config = RunConfig.model_validate(settings)
    estimate = memory_bytes(config, ranks, stage, activation_bytes(config))
    assert sum(estimate.values()) == pytest.approx(int(output.read_text()), rel=0.15)


def test_held_bytes_are_those_of_tensors_that_are_there() -> None:
    known = torch.zeros(1000)
    with HeldBytes([known]) as held:
        kept = known[:10] + 1
        for _ in range(3):
            known.double()
        torch.empty(10**6, device="meta")
        view = known[5:]
    assert held.peak == 40 + 8000
    del kept, view


@pytest.mark.parametrize("T", [128, 16384])
def test_log_linear_ssd_is_counted_as_its_kernels_keep(T: int) -> None:
    pytest.importorskip("triton")
    B, G, H, K, V, L = 2, 1, 4, 128, 64, num_levels(T)
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        FakeTensorMode(),
        as_on_gpu(),
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
    ):
        q, k = (torch.zeros(B, T, G, K, dtype=torch.bfloat16) for _ in range(2))
        v = torch.zeros(B, T, H, V, dtype=torch.bfloat16, requires_grad=True)
        g, level_weights = torch.zeros(B, T, H), torch.zeros(B, T, H, L)
        o, _ = log_linear_ssd(q, k, v, g, level_weights)
        o.sum().backward()
    inputs = 2 * B * T * (2 * G * K + H * V) + 4 * B * T * H * (1 + L)
    per_token = 2 * K * V / 128 + 2 * 16 + 4 * (3 + max(1, L - 7))
    assert sum(kept.values()) == pytest.approx(inputs + B * T * H * per_token, rel=0.01)


@pytest.mark.parametrize("mixer", ["log_linear_mamba2", "log_linear_gated_deltanet"])
def test_an_estimate_leaves_nothing_behind(settings: dict[str, Any], mixer: str) -> None:
    """Plans of chunks outlive a call; those made for fake tensors must serve real ones."""
    settings["model"]["mixer"] = mixer
    config = RunConfig.model_validate(settings)
    assert activation_bytes(config) > 0
    tokens = torch.zeros(1, settings["data"]["seq_len"], dtype=torch.int64)
    logits = LanguageModel(config.model)(tokens)
    assert type(logits) is torch.Tensor
    assert activation_bytes(config) > 0


@pytest.mark.skipif(not triton_interprets(), reason="runs Triton's kernels in its interpreter")
def test_selective_checkpointing_runs_an_operator_once(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eagerly too, where an operator is no operation of PyTorch's unless somebody watches."""
    from kernels.log_linear_ssd import triton_op

    settings["model"] |= {"mixer": "log_linear_mamba2", "num_layers": 1}
    config = RunConfig.model_validate(settings)
    model, runs = LanguageModel(config.model), []
    initialize(model, 0)
    original = triton_op.forward
    monkeypatch.setattr(triton_op, "forward", lambda *args: runs.append(1) or original(*args))
    parallel = config.parallel.model_copy(update={"activation_checkpointing": "selective"})
    prepare_blocks(model, parallel)
    with as_on_gpu():
        model(torch.zeros(1, 32, dtype=torch.int64)).square().sum().backward()
    assert len(runs) == 1


def test_checkpointing_and_offload_lower_the_estimate(settings: dict[str, Any]) -> None:
    settings["model"]["num_layers"] = 8
    settings["model"]["mixer"] = "log_linear_mamba2"
    sizes = []
    for mode in ("none", "selective", "full"):
        settings["parallel"]["activation_checkpointing"] = mode
        sizes.append(activation_bytes(RunConfig.model_validate(settings)))
    assert sizes[0] > sizes[1] > sizes[2] > 0
    settings["parallel"] |= {"zero_stage": 1}
    config = RunConfig.model_validate(settings)
    offloaded = RunConfig.model_validate(
        settings | {"parallel": settings["parallel"] | {"offload_optimizer": True}}
    )
    assert memory_bytes(config, 2, 1, 0.0)["optimizer"] > 0
    assert memory_bytes(offloaded, 2, 1, 0.0)["optimizer"] == 0
