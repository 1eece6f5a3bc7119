"""Memory of a GPU in training, estimated without one.

    state        parameters, gradients, optimizer: shared out by ZeRO (models/accounting.py)
    buffers      where ZeRO collects gradients for a reduction; at stage 3 also the parameters that
                 it has gathered; in the optimizer's step what that makes on the way
    activations  the most that forward and backward pass of a micro-batch hold at a time, the loss
                 included: both run on fake tensors, which have shapes and no memory

Forward and backward pass on one side, the optimizer's step on the other need their memory one after
the other, so what counts is the larger. Not counted: the CUDA context and libraries (about
0.5 GiB), what fragmentation costs, and what a kernel allocates and frees within one call.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.accounting import parameter_count, training_state_bytes
from models.fake_tensors import fake_tensors
from models.language_model import LanguageModel
from models.parameter_groups import is_hidden_matrix
from pretrain.blocks import prepare_blocks
from pretrain.config import RunConfig
from pretrain.loss import SummedLoss

GATHERED_PARAMETERS = 10**9
"""Parameters that ZeRO-3 gathers ahead and keeps at most (stage3_max_live_parameters)."""


def memory_bytes(
    config: RunConfig, ranks: int, zero_stage: int, activations: float
) -> dict[str, float]:
    """Bytes of one GPU by kind, at its peak.

    Args:
        activations: of `activation_bytes`.
    """
    state = training_state_bytes(config.model, zero_stage, ranks, moments_per_parameter(config))
    if config.parallel.offload_optimizer:
        state |= {"master copy": 0.0, "optimizer": 0.0}
    whole = 4.0 * parameter_count(config.model)
    bucket = min(config.parallel.reduce_bucket_mb * 2**20, whole) if zero_stage else 0.0
    kept = bucket if zero_stage == 3 else 0.0  # at stages 1 and 2 there is one in backward only
    gathered = 0.0
    if zero_stage == 3 and ranks > 1:
        gathered = min(4.0 * GATHERED_PARAMETERS, whole)
    passes = {"buffers": bucket + gathered, "activations": activations}
    step = {"buffers": kept + _step_bytes(config, zero_stage, whole / ranks), "activations": 0.0}
    larger = max((passes, step), key=lambda kinds: sum(kinds.values()))
    return {**state, **larger}


def moments_per_parameter(config: RunConfig) -> float:
    """fp32 numbers that the optimizer keeps for a parameter, on average: AdamW 2, Muon 1."""
    if config.optimizer.kind == "adamw":
        return 2.0
    with torch.device("meta"):
        model = LanguageModel(config.model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    hidden = sum(size for name, size in sizes.items() if is_hidden_matrix(name))
    return 2.0 - hidden / sum(sizes.values())


def _step_bytes(config: RunConfig, zero_stage: int, share: float) -> float:
    """What a step of the optimizer makes on the way."""
    if zero_stage == 0 or config.parallel.offload_optimizer:
        return 0.0  # one parameter after the other; on the CPU
    # DeepSpeed lays a rank's gradients side by side; AdamW on a CPU needs two temporaries of all
    # that it gets at once, its fused kernel none.
    return share * (3 if config.parallel.device == "cpu" else 1)


def activation_bytes(config: RunConfig) -> float:
    """The most that the forward and backward pass of one micro-batch hold beside parameters and
    their gradients, by what the model's operators allocate on the run's kind of device."""
    device = torch.device("cpu")
    B, T = config.batch.micro_batch_rows, config.data.seq_len
    with fake_tensors(gpu=config.parallel.device != "cpu"):
        model = LanguageModel(config.model)
        tokens = torch.zeros(B, T, dtype=torch.int64)
        prepare_blocks(model, config.parallel.model_copy(update={"compile": False}))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)
        chunk = config.training.loss_chunk_tokens
        loss = SummedLoss(model, device, config.parallel.precision, 0.0, chunk)
        with HeldBytes(model.parameters()) as held:
            objective, _ = loss(tokens, tokens, None)
            objective.backward()
    return float(held.peak)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that are still there.

    Args:
        known: tensors that are not counted.

    Attributes:
        peak: the most there have been at a time.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self._watched: dict[int, Any] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self._watched[key] = weakref.ref(storage, partial(self._drop, key))

    def _drop(self, key: int, _: Any) -> None:
        self._now -= self._sizes.pop(key)
        del self._watched[key]
