"""Log-linear SSD's Triton kernels as one operator for PyTorch: forward, backward, shapes.

A custom operator is opaque to torch.compile, which therefore traces through it without a break;
its fake form tells the shapes, its autograd form the gradients. Which chunks there are is decided
inside it, on the host, from cu_seqlens and the first positions (both on the CPU): no device sync.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.checks import document_lengths
from kernels.log_linear_ssd.triton_backward import backward
from kernels.log_linear_ssd.triton_forward import Kept, empty_kept, forward
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
    inputs = [_ready(x) for x in (q, k, v, log_decay.float(), level_weights)]
    if torch.compiler.is_compiling():
        return torch.ops.fenwick.log_linear_ssd(*inputs, cu_seqlens, first_positions)[0]
    plan = _plan(v, cu_seqlens, first_positions)
    room = Room.for_rows(v.shape[0], v.shape[1], cu_seqlens)
    return _Eager.apply(*inputs, plan, room)  # type: ignore[no-untyped-call]


def _ready(x: Tensor) -> Tensor:
    """Contiguous, and on 16 bytes as the descriptors ask (a slice of a tensor may not be)."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return x  # inductor's buffers are aligned, and a tracer has no addresses
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _plan(v: Tensor, cu_seqlens: Tensor | None, first_positions: Tensor | None) -> TreePlan:
    lengths = document_lengths(v.shape[0], v.shape[1], cu_seqlens)
    if first_positions is None:
        first = (0,) * len(lengths)
    else:
        first = tuple(position // CHUNK for position in first_positions.tolist())
    return tree_plan(lengths, first, v.device)


class _Eager(torch.autograd.Function):
    """The same operator without the custom operator's machinery, which costs a millisecond."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, plan, room = args
        o, kept = forward(*inputs, plan, room)
        ctx.save_for_backward(*inputs, *kept)
        ctx.plan, ctx.room = plan, room
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, kept = ctx.saved_tensors[:5], Kept(*ctx.saved_tensors[5:])
        gradients = backward(*inputs, _ready(grads[0]), kept, ctx.plan, ctx.room)
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
    plan = _plan(v, cu_seqlens, first_positions)
    o, kept = forward(q, k, v, log_decay, level_weights, plan, room)
    return [o, *kept]


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
    return [torch.empty_like(v), *empty_kept(q, v, level_weights, room)]


@torch.library.custom_op("fenwick::log_linear_ssd_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    do: Tensor,
    kept: list[Tensor],
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    room = Room.for_rows(v.shape[0], v.shape[1], cu_seqlens)
    plan = _plan(v, cu_seqlens, first_positions)
    gradients = backward(q, k, v, log_decay, level_weights, do, Kept(*kept), plan, room)
    return list(gradients)


@_backward.register_fake
def _backward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    do: Tensor,
    kept: list[Tensor],
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
    *inputs, cu_seqlens, first_positions = ctx.saved_tensors[:7]  # type: ignore[attr-defined]
    kept = list(ctx.saved_tensors[7:])  # type: ignore[attr-defined]
    gradients = torch.ops.fenwick.log_linear_ssd_backward(
        *inputs, _ready(do), kept, cu_seqlens, first_positions
    )
    return (*gradients, None, None)


_forward.register_autograd(_gradients, setup_context=_save)
