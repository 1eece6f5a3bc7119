"""Memory of a GPU in training, estimated without one.

    state        parameters, gradients, optimizer: shared out by ZeRO (models/accounting.py)
    buffers      where gradients are collected for a reduction, the gradient of the output matrix
    activations  what autograd keeps of one micro-batch, bf16 copies of matrices included, found by
                 running the forward pass on fake tensors, which have shapes and no memory
    loss         one chunk of logits, several times over

The operators are counted as Triton kernels behave: they keep their inputs and one state [K, V] in
fp32 of every head and chunk. What is not counted: the CUDA context and libraries (about 0.5 GiB)
and what fragmentation costs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from models.accounting import training_state_bytes
from models.language_model import LanguageModel
from models.parameter_groups import is_hidden_matrix
from models.recurrent_mixer import RecurrentMixer
from pretrain.blocks import PRODUCTS
from pretrain.config import RunConfig
from pretrain.loss import SummedLoss

CHUNK = 64
"""Tokens of a chunk of the kernels, of which they keep a state."""
LOSS_COPIES = 3
"""Logits, their gradient, and a temporary of the same size, in fp32."""


def memory_bytes(
    config: RunConfig, ranks: int, zero_stage: int, activations: float
) -> dict[str, float]:
    """Bytes of one GPU by kind, at its peak.

    Args:
        activations: of `activation_bytes`.
    """
    with torch.device("meta"):
        model = LanguageModel(config.model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    moments = 2.0
    if config.optimizer.kind == "muon":
        hidden = sum(size for name, size in sizes.items() if is_hidden_matrix(name))
        moments -= hidden / sum(sizes.values())
    state = training_state_bytes(config.model, zero_stage, ranks, moments)
    if config.parallel.offload_optimizer:
        state |= {"master copy": 0.0, "optimizer": 0.0}
    output = config.model.vocab_size * config.model.d_model
    bucket = min(config.parallel.reduce_bucket_mb * 2**20, 4.0 * sum(sizes.values()))
    # At stages 2 and 3 the bucket is free again when activations are at their peak.
    bucket = min(config.parallel.reduce_bucket_mb * 2**20, 4.0 * sum(sizes.values()))
    buffers = 4.0 * output + (bucket if zero_stage == 1 else 0.0)
    tokens = config.batch.micro_batch_rows * config.data.seq_len
    chunk = min(config.training.loss_chunk_tokens, tokens)
    loss = 4.0 * LOSS_COPIES * chunk * config.model.vocab_size
    return {**state, "buffers": buffers, "activations": activations, "loss": loss}


def activation_bytes(config: RunConfig) -> float:
    """What autograd keeps of the forward pass of one micro-batch, at the peak.

    Where blocks are computed again, that is their inputs (and the results of matrix products, under
    selective) and everything of the one block that the backward pass is in.
    """
    kept: dict[int, int] = {}
    B, T, D = config.batch.micro_batch_rows, config.data.seq_len, config.model.d_model
    with FakeTensorMode():
        model = LanguageModel(config.model)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        for block in model.blocks:
            if isinstance(block.mixer, RecurrentMixer):
                block.mixer.operator = _as_kernel
        tokens = torch.zeros(B, T, dtype=torch.int64)
        # One chunk: fake tensors cost nothing.
        loss = SummedLoss(model, torch.device("cpu"), config.parallel.precision, 0.0, B * T)
        with saved_tensors_hooks(count, lambda tensor: tensor), _Products() as products:
            loss(tokens, tokens, None)
    # The loss keeps the gradients of its inputs; that of the output matrix is among the buffers.
    everything = float(sum(kept.values()) - 4 * config.model.vocab_size * D)
    mode = config.parallel.activation_checkpointing
    if mode == "none":
        return everything
    inputs = 4.0 * B * T * D * config.model.num_layers
    block_bytes = everything / config.model.num_layers
    return inputs + block_bytes + (products.bytes if mode == "selective" else 0)


class _Products(TorchDispatchMode):
    """Counts the bytes of the results of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in PRODUCTS:
            self.bytes += result.nbytes
        return result


class _KernelShapes(torch.autograd.Function):
    """Keeps what a kernel keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        q, _, v = inputs[:3]
        B, T, H, V = v.shape
        states = v.new_empty(B, -(-T // CHUNK), H, q.shape[-1], V, dtype=torch.float32)
        ctx.save_for_backward(*inputs, states)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("nothing is differentiated here")


def _as_kernel(*inputs: Tensor, **_: Any) -> tuple[Tensor, None]:
    apply: Callable[..., Tensor] = _KernelShapes.apply
    return apply(*inputs), None
