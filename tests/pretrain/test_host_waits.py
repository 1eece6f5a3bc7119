"""How often an update makes the host wait for the device: once.

On a CPU nothing waits, so what would be on a device is told apart from what the host made: numbers
that are read (`.item()`, `bool(tensor)`, `.tolist()` of one number at a time) count where they come
from the parameters or the batch, and not where they come from `torch.tensor(...)` alone.
"""

import traceback
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_prep.training_rows import TrainingRows
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain.config import RunConfig
from pretrain.data import MicroBatch, training_batches
from pretrain.distributed import World
from pretrain.engine import Engine
from pretrain.health import Health

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)


class Waits(TorchDispatchMode):
    """Counts reads of numbers that a device would have."""

    def __init__(self, of_host: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.places: list[str] = []
        self.kept: list[Tensor] = list(of_host)  # so that no address is used twice
        self.made_by_host = {tensor.untyped_storage()._cdata for tensor in self.kept}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        of_host = [x.untyped_storage()._cdata in self.made_by_host for x in inputs]
        if op in READS and not all(of_host):
            self.note()
        result = op(*args, **(kwargs or {}))
        made = op is aten.lift_fresh.default or (bool(of_host) and all(of_host))
        for tensor in tree_leaves(result):
            if made and isinstance(tensor, Tensor):
                self.made_by_host.add(tensor.untyped_storage()._cdata)
                self.kept.append(tensor)
        return result

    def note(self) -> None:
        self.places.append("".join(traceback.format_stack(limit=8)[:-2]))

    def __enter__(self) -> "Waits":
        original = self._tolist = torch.Tensor.tolist  # not an operation that a mode sees

        def tolist(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata not in self.made_by_host:
                self.note()
            return original(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)


def waits_of_update(
    engine: Engine, batches: list[MicroBatch], health: Health, **options: Any
) -> list[str]:
    # AdamW counts its steps on the CPU, or reads the count in its fused kernel only.
    counts = [state["step"] for state in engine._optimizer.state.values()]
    documents = [batch.cu_seqlens for batch in batches if batch.cu_seqlens is not None]
    with Waits([*counts, *documents]) as waits:
        engine.update(batches, 1e-3, health, **options)
    return waits.places


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_waits_once(
    settings: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    settings["parallel"] |= {"zero_stage": stage, "precision": "bf16"}
    settings["model"] |= {"num_layers": 3}
    settings["model"]["mixer"] = ["log_linear_mamba2", "log_linear_gated_deltanet", "attention"]
    settings["model"]["attention"] = {"num_heads": 2}
    config = RunConfig.model_validate(settings)
    model = LanguageModel(config.model)
    initialize(model, 0)
    engine = Engine(model, config, world, torch.device("cpu"))
    rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
    updates = list(training_batches(rows, config, 0, 1, 0))[:3]
    assert all(len(batches) > 1 for batches in updates)
    assert any(batch.cu_seqlens is not None for batch in updates[1])
    # The loader's work is the host's own.
    valid = {id(batch): batch.valid_tokens for batches in updates for batch in batches}
    monkeypatch.setattr(MicroBatch, "valid_tokens", property(lambda batch: valid[id(batch)]))
    health = Health(config.health)
    engine.update(updates[0], 1e-3, health)
    waits = waits_of_update(engine, updates[1], health)
    assert len(waits) == 1, "\n\n".join(waits)


def test_a_wait_is_seen() -> None:
    parameter = torch.ones(3)
    with Waits() as waits:
        assert float(torch.tensor(2.0) * 3) == 6
        assert not waits.places
        assert float(parameter.sum()) == 3
        assert bool((parameter * torch.tensor(2.0) > 1).all())
        assert torch.tensor([1.0, 2.0]).tolist() == [1, 2]
        assert (parameter + 1).tolist() == [2, 2, 2]
    assert len(waits.places) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_waits_once_on_a_gpu(
    settings: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """By torch's own debug mode, which warns of every operation that synchronises.

    DeepSpeed's ZeRO-3 also waits for streams of its own and makes a tensor on the host for each
    norm: those places, and only those, are let through.
    """
    settings["parallel"] |= {"zero_stage": stage, "precision": "bf16", "device": "cuda"}
    config = RunConfig.model_validate(settings)
    model = LanguageModel(config.model)
    initialize(model, 0)
    engine = Engine(model, config, world, torch.device("cuda"))
    rows = TrainingRows(config.data.dataset, "train", config.data.seq_len)
    updates = list(training_batches(rows, config, 0, 1, 0))[:3]
    health = Health(config.health)
    engine.update(updates[0], 1e-3, health)
    engine.update(updates[1], 1e-3, health)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing CUDA") as warned:
            engine.update(updates[2], 1e-3, health)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [
        f"{w.filename}:{w.lineno}"
        for w in warned
        if "synchronizing CUDA operation" in str(w.message)
    ]
    own = ("zero/stage3.py", "zero/partitioned_param_coordinator.py", "torch/cuda/streams.py")
    if stage == 3:
        waits = [place for place in waits if not place.rsplit(":", 1)[0].endswith(own)]
    assert len(waits) == 1, waits
