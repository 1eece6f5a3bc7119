"""One way to give PyTorch an operator of ours: eager, traced and differentiated.

An operator is four functions of tensors and plain numbers:

    forward(*inputs) -> results                     the outputs come first
    shapes(*inputs) -> the same, without numbers
    backward(*inputs, kept, grads) -> gradients     of the floating-point tensors in order; those
                                                    at the end may be left out: constants
    backward_shapes(*inputs, kept, grads) -> the same, without numbers

Traced (torch.compile, fake tensors) it is a custom operator; called eagerly an autograd.Function,
because the machinery of a custom operator takes longer than a small kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import is_traced

Tensors = list[Tensor]


def make_operator(
    name: str,
    outputs: int,
    keep: Sequence[int],
    forward: Callable[..., Tensors],
    shapes: Callable[..., Tensors],
    backward: Callable[..., Tensors],
    backward_shapes: Callable[..., Tensors],
) -> Callable[..., tuple[Tensor, ...]]:
    """The operator `fenwick::<name>`; called with the inputs, it returns its outputs.

    Args:
        outputs: how many of forward's results are outputs.
        keep: which results the backward pass gets as `kept`.
    """
    forward_op = torch.library.custom_op(f"fenwick::{name}", forward, mutates_args=())
    forward_op.register_fake(shapes)
    backward_op = torch.library.custom_op(f"fenwick::{name}_backward", backward, mutates_args=())
    backward_op.register_fake(backward_shapes)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.others = tuple(None if isinstance(x, Tensor) else (x,) for x in inputs)
        ctx.save_for_backward(*tensors, *(output[i] for i in keep))

    def gradients(
        ctx: Any, grads: Tensors, run: Callable[..., Tensors]
    ) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)  # taken once, as activation checkpointing asks
        inputs = [saved.pop(0) if other is None else other[0] for other in ctx.others]
        found = iter(run(*inputs, saved, [x.contiguous() for x in grads[:outputs]]))
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
        return tuple(next(found, None) if is_float else None for is_float in floats)

    forward_op.register_autograd(
        lambda ctx, grads: gradients(ctx, grads, backward_op), setup_context=save
    )

    run_forward, run_backward = forward, backward

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            results = run_forward(*inputs)
            save(ctx, inputs, results)
            return tuple(results[:outputs])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return gradients(ctx, list(grads), run_backward)

    def call(*inputs: Any) -> tuple[Tensor, ...]:
        if is_traced(next(x for x in inputs if isinstance(x, Tensor))):
            return tuple(forward_op(*inputs)[:outputs])
        result: tuple[Tensor, ...] = Eager.apply(*inputs)
        return result

    return call
