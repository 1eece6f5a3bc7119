"""The gated delta rule's Triton kernels as one operator for PyTorch: forward, backward, shapes.

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
from kernels.log_linear_gated_delta.launch import PairShape
from kernels.log_linear_gated_delta.pair_plan import (
    PAIR_CHUNK,
    PairPlan,
    pair_chunks,
    pair_plan,
)
from kernels.log_linear_gated_delta.triton_backward import pair_backward
from kernels.log_linear_gated_delta.triton_forward import KeptPairs, pair_forward


def log_linear_gated_delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    cu_seqlens: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o of `log_linear_gated_delta_rule` for tokens alone; and, with first_positions, the queries
    carried to their document's first token, q_t^T (I - beta k k^T) ... without decay, [B, T, H, K]
    fp32: what an initial state adds to o is their product with it.

    Args:
        q, k: [B, T, G, K];  v: [B, T, H, V], K up to 256, V up to 512; all three of one dtype:
            bf16, fp16 or fp32. Any size is filled up to a multiple of 64.
        log_decay, beta: [B, T, H], taken in fp32;  level_weights: [B, T, H, L].
        cu_seqlens: [N+1] int64 on the CPU, needs B = 1.
        first_positions: [N] int64 on the CPU, multiples of 64: where each document's first token
            lies in its document; None for zero.
    """
    K, V = q.shape[3], v.shape[3]
    q, k, v = (F.pad(x, (0, -x.shape[3] % 64)) if x.shape[3] % 64 else x for x in (q, k, v))
    q, k, v, level_weights = (ready(x) for x in (q, k, v, level_weights))
    g, beta = ready(log_decay.float()), ready(beta.float())
    plan_inputs = cu_seqlens, first_positions
    if is_traced(v):
        outputs = torch.ops.fenwick.log_linear_gated_delta(
            q, k, v, g, beta, level_weights, *plan_inputs
        )
        o, far = outputs[:2]
    else:
        plan = _plan(level_weights, *plan_inputs)
        NC = pair_chunks(v.shape[0], v.shape[1], cu_seqlens)
        o, far = _Eager.apply(
            q, k, v, g, beta, level_weights, plan, NC, first_positions is not None
        )
    return o[..., :V], far[..., :K] if first_positions is not None else None


def _plan(
    level_weights: Tensor, cu_seqlens: Tensor | None, first_positions: Tensor | None
) -> PairPlan:
    """ValueError where cu_seqlens or the number of levels does not fit."""
    B, T = level_weights.shape[:2]
    lengths = document_lengths(B, T, cu_seqlens)
    far = first_positions is not None
    first = tuple(first_positions.tolist()) if far else (0,) * len(lengths)  # type: ignore[union-attr]
    check_level_count(level_weights, lengths, first)
    return pair_plan(lengths, tuple(p // PAIR_CHUNK for p in first), far, level_weights.device)


def _to_tokens(rows: Tensor, plan: PairPlan, v: Tensor) -> Tensor:
    """[H, num_chunks, 64, K] -> [B, T, H, K] in fp32."""
    tokens = rows.float().flatten(1, 2).index_select(1, plan.slots)
    return tokens.transpose(0, 1).reshape(*v.shape[:3], -1)


def _to_rows(x: Tensor, plan: PairPlan) -> Tensor:
    """The inverse, zero in empty slots."""
    H, K = x.shape[2:]
    rows = x.new_zeros(plan.num_chunks * PAIR_CHUNK, H, K)
    rows = rows.index_copy(0, plan.slots, x.flatten(0, 1))
    return rows.unflatten(0, (-1, PAIR_CHUNK)).permute(2, 0, 1, 3).contiguous()


class _Eager(torch.autograd.Function):
    """The same operator without the custom operator's machinery, which costs a millisecond."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(args[2]):  # Triton launches on the current device
            o, far, buffers = pair_forward(*args)
        ctx.save_for_backward(*args[:6], *buffers)
        ctx.plan, ctx.NC, ctx.with_far = args[6:]
        if far is None:
            return o, o.new_empty(0)
        return o, _to_tokens(far, ctx.plan, o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, level_weights, *buffers = ctx.saved_tensors
        do = ready(grads[0])
        dfar = _to_rows(grads[1], ctx.plan) if ctx.with_far else None
        gradients = pair_backward(
            q, k, v, g, beta, level_weights, do, dfar, buffers, ctx.plan, ctx.NC
        )
        return (*gradients, None, None, None)


@torch.library.custom_op("fenwick::log_linear_gated_delta", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    plan = _plan(level_weights, cu_seqlens, first_positions)
    NC = pair_chunks(v.shape[0], v.shape[1], cu_seqlens)
    with_far = first_positions is not None
    inputs = (q, k, v, log_decay, beta, level_weights)
    with torch.cuda.device_of(v):
        o, far, buffers = pair_forward(*inputs, plan, NC, with_far)
    return [o, o.new_empty(0) if far is None else _to_tokens(far, plan, v), *buffers]


@_forward.register_fake
def _forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    NC = pair_chunks(v.shape[0], v.shape[1], cu_seqlens)
    far = v.new_empty(0)
    if first_positions is not None:
        far = v.new_empty(*v.shape[:3], q.shape[3], dtype=torch.float32)
    return [torch.empty_like(v), far, *KeptPairs.buffers(PairShape.of(q, v, level_weights), NC)]


@torch.library.custom_op("fenwick::log_linear_gated_delta_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    do: Tensor,
    dfar: Tensor | None,
    buffers: list[Tensor],
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    plan = _plan(level_weights, cu_seqlens, first_positions)
    NC = pair_chunks(v.shape[0], v.shape[1], cu_seqlens)
    rows = None if dfar is None else _to_rows(dfar, plan)
    inputs = (q, k, v, log_decay, beta, level_weights)
    with torch.cuda.device_of(v):
        return list(pair_backward(*inputs, ready(do), rows, buffers, plan, NC))


@_backward.register_fake
def _backward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    do: Tensor,
    dfar: Tensor | None,
    buffers: list[Tensor],
    cu_seqlens: Tensor | None,
    first_positions: Tensor | None,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v, log_decay, beta, level_weights)]


def _save(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: list[Tensor]
) -> None:
    ctx.save_for_backward(*inputs, *output[2:])
    ctx.set_materialize_grads(False)  # those of the buffers would be as large as the buffers


def _gradients(
    ctx: torch.autograd.function.FunctionCtx, grads: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    saved = list(ctx.saved_tensors)  # type: ignore[attr-defined]  # once, as checkpointing asks
    inputs, (cu_seqlens, first_positions), buffers = saved[:6], saved[6:8], saved[8:]
    q, v = inputs[0], inputs[2]
    do, dfar = grads[:2]
    if do is None:
        do = torch.zeros_like(v)
    if first_positions is None:
        dfar = None
    elif dfar is None:
        dfar = v.new_zeros(*v.shape[:3], q.shape[3], dtype=torch.float32)
    gradients = torch.ops.fenwick.log_linear_gated_delta_backward(
        *inputs, do, dfar, buffers, cu_seqlens, first_positions
    )
    return (*gradients, None, None)


_forward.register_autograd(_gradients, setup_context=_save)
