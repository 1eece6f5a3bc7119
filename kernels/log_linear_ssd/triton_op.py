"""Log-linear SSD's Triton kernels as one operator for PyTorch: forward, backward, shapes.

A custom operator is opaque to torch.compile, which therefore traces through it without a break;
its fake form tells the shapes, its autograd form the gradients. Which chunks there are is decided
inside it, on the host, from cu_seqlens and the first positions (both on the CPU): no device sync.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_level_count, document_lengths
from kernels.dispatch import is_traced
from kernels.launching import ready
from kernels.log_linear_ssd.launch import Shape
from kernels.log_linear_ssd.triton_backward import backward
from kernels.log_linear_ssd.triton_forward import Kept, forward
from kernels.tree_plan import CHUNK, Room, TreePlan, tree_plan


def log_linear_ssd_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    cu_seqlens: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> Tensor:
    """o of `log_linear_ssd` for tokens alone; what an initial state adds is state_terms.py's.

    Args:
        q, k: [B, T, G, K];  v: [B, T, H, V], K and V multiples of 16, at most 256; all three of one
            dtype: bf16, fp16 or fp32.
        log_decay: [B, T, H];  level_weights: [B, T, H, L].
        cu_seqlens: [N+1] int64 on the CPU, needs B = 1.
        first_positions: [N] int64 on the CPU, multiples of 128: where each document's first token
            lies in its document; None for zero.
    """
    V = v.shape[3]
    if V % 64:
        # Triton 3.6 compiles tiles of V below 64 wrongly for some K (256 with 96, 48 with 80): they
        # read outside memory (seen on an H200, not in the interpreter).
        v = F.pad(v, (0, -V % 64))
    q, k, v, level_weights = (ready(x) for x in (q, k, v, level_weights))
    g = ready(log_decay.float())
    if is_traced(v):
        outputs = torch.ops.fenwick.log_linear_ssd(
            q, k, v, g, level_weights, cu_seqlens, first_positions
        )
        return outputs[0][..., :V]
    plan = _plan(level_weights, cu_seqlens, first_positions)
    room = Room.for_rows(v.shape[0], v.shape[1], cu_seqlens)
    return _Eager.apply(q, k, v, g, level_weights, plan, room)[..., :V]


def _plan(
    level_weights: Tensor, cu_seqlens: Tensor | None, first_positions: Tensor | None
) -> TreePlan:
    """ValueError where cu_seqlens or the number of levels does not fit."""
    B, T = level_weights.shape[:2]
    lengths = document_lengths(B, T, cu_seqlens)
    first = (0,) * len(lengths) if first_positions is None else tuple(first_positions.tolist())
    check_level_count(level_weights, lengths, first)
    return tree_plan(lengths, tuple(p // CHUNK for p in first), level_weights.device)


class _Eager(torch.autograd.Function):
    """The same operator without the custom operator's machinery, which costs a millisecond."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with torch.cuda.device_of(args[2]):  # Triton launches on the current device
            o, buffers = forward(*args)
        ctx.save_for_backward(*args[:5], *buffers)
        ctx.plan, ctx.room = args[5:]
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, level_weights, *buffers = ctx.saved_tensors
        do = ready(grads[0])
        gradients = backward(q, k, v, g, level_weights, do, buffers, ctx.plan, ctx.room)
        return (*gradients, None, None)


@torch.library.custom_op("fenwick::log_linear_ssd", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    room = Room.for_rows(v.shape[0], v.shape[1], cu_seqlens)
    plan = _plan(level_weights, cu_seqlens, first_positions)
    with torch.cuda.device_of(v):
        o, buffers = forward(q, k, v, log_decay, level_weights, plan, room)
    return [o, *buffers]


@_forward.register_fake
def _forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    room = Room.for_rows(v.shape[0], v.shape[1], cu_seqlens)
    return [torch.empty_like(v), *Kept.buffers(Shape.of(q, v, level_weights), room)]


@torch.library.custom_op("fenwick::log_linear_ssd_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    do: Tensor,
    buffers: list[Tensor],
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    room = Room.for_rows(v.shape[0], v.shape[1], cu_seqlens)
    plan = _plan(level_weights, cu_seqlens, first_positions)
    with torch.cuda.device_of(v):
        gradients = backward(q, k, v, log_decay, level_weights, ready(do), buffers, plan, room)
    return list(gradients)


@_backward.register_fake
def _backward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    do: Tensor,
    buffers: list[Tensor],
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v, log_decay, level_weights)]


def _save(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: list[Tensor]
) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: torch.autograd.function.FunctionCtx, grads: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    do = grads[0]
    if do is None:
        return (None,) * 7
    # Taken once: activation checkpointing gives them out only once.
    q, k, v, g, level_weights, cu_seqlens, first_positions, *buffers = ctx.saved_tensors  # type: ignore[attr-defined]
    gradients = torch.ops.fenwick.log_linear_ssd_backward(
        q, k, v, g, level_weights, do, buffers, cu_seqlens, first_positions
    )
    return (*gradients, None, None)


_forward.register_autograd(_gradients, setup_context=_save)
