"""What is done to the model's blocks from outside: activation checkpointing and compilation.

none        everything the backward pass needs is kept
selective   results of matrix products and operators are kept, the rest is computed again
full        only a block's input is kept
"""

from functools import partial
from typing import Any

import torch
from torch import nn
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
            block.compile()


OPERATORS = ("log_linear", "scaled_dot_product")
"""Parts of the names of operators over the tokens of a row; norms and gates are quick."""


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if op in PRODUCTS or any(part in op.name() for part in OPERATORS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
