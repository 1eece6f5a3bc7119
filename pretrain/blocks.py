"""What is done to the model's blocks from outside: activation checkpointing and compilation.

none        everything the backward pass needs is kept
selective   results of matrix products and operators are kept, the rest is computed again
full        only a block's input is kept
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pretrain.sections import ParallelConfig

PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
)


def prepare_blocks(model: nn.Module, settings: ParallelConfig) -> None:
    """Wraps the forward of every block as the settings say; parameters keep their names."""
    blocks: Any = getattr(model, "blocks", ())
    for block in blocks:
        if settings.activation_checkpointing != "none":
            options: dict[str, Any] = {"use_reentrant": False}
            if settings.activation_checkpointing == "selective":
                options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
            block.forward = partial(checkpoint, block.forward, **options)
        if settings.compile:
            block.compile(backend=compile_for_any_block)


VECTOR_BYTES = 16
"""The widest load of a GPU; inductor takes it where an address allowed it at compile time."""


def compile_for_any_block(graph: Any, example_inputs: list[Tensor]) -> Callable[..., Any]:
    """inductor, for parameters anywhere in memory.

    All blocks share the code that the first one had compiled, and inductor takes a parameter's
    address for fixed; ZeRO has every parameter inside one long buffer, aligned in one block and
    not in the next, where wide loads are an illegal access. What is not aligned is copied.
    """
    compiled: Any = compile_fx(graph, example_inputs)
    return with_aligned_inputs(compiled)


def with_aligned_inputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        return compiled(*map(_aligned, inputs))

    return call


def _aligned(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and x.data_ptr() % VECTOR_BYTES else x


OPERATORS = ("log_linear", "scaled_dot_product")
"""Parts of the names of operators over the tokens of a row; norms and gates are quick."""


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if op in PRODUCTS or any(part in op.name() for part in OPERATORS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
