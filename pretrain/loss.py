"""Output matrix and cross-entropy in chunks, so that all logits never exist at once.

    l = x W^T (c tanh(l / c) with a soft cap);   Z = log sum exp l
    nll = sum over valid labels of Z - l[label];   loss = nll + z * sum over valid labels of Z^2

The gradients of x and W are computed with the logits, in the forward pass, and only multiplied in
the backward one: nothing is computed twice, and W, be it the embedding or not, is not needed again
after it was gathered (ZeRO-3). The method is that of Liger's fused kernel, without a kernel:
products of [chunk, D] with [D, vocab_size] fill a GPU by themselves.
"""

from typing import Any

import torch
from torch import Tensor, nn

from data_prep.shards import IGNORED_LABEL


class _ChunkedCrossEntropy(torch.autograd.Function):
    """(x [N, D], W [V, D], labels [N]) -> (loss, nll), sums over valid labels, fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        soft_cap: float | None,
        z_loss: float,
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        differentiate = any(ctx.needs_input_grad[:2])
        W = weight.to(dtype)
        nll = torch.zeros((), device=x.device)
        squares = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x) if differentiate else None
        grad_W = torch.zeros_like(weight) if differentiate else None
        for begin in range(0, len(x), chunk):
            x_c = x[begin : begin + chunk].to(dtype)
            label = labels[begin : begin + chunk]
            valid = label != IGNORED_LABEL
            label = label.clamp(min=0)[:, None]
            logits = x_c @ W.T
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits.float() / soft_cap)
            log_p = logits.log_softmax(-1, dtype=torch.float32)
            log_p_label = log_p.gather(-1, label)
            Z = (logits.gather(-1, label) - log_p_label)[:, 0]
            nll -= (log_p_label[:, 0] * valid).sum()
            squares += (Z.square() * valid).sum()
            if grad_x is None or grad_W is None:
                continue
            # The logits' gradient p - 1[label], each number read and written as seldom as can be;
            # rows that do not count are taken out of its products.
            of_label = log_p_label.exp() - 1
            if soft_cap is None:
                del logits
            if soft_cap is None and not z_loss and dtype != torch.float32:
                grad = torch.exp(log_p, out=torch.empty_like(log_p, dtype=dtype))
            else:
                grad = log_p.exp_()
                pull = 2 * z_loss * Z[:, None]
                of_label += pull * (of_label + 1)
                grad *= 1 + pull
                if soft_cap is not None:
                    slope = 1 - (logits / soft_cap).square()
                    of_label *= slope.gather(-1, label)
                    grad *= slope
            del log_p
            grad = grad.scatter_(-1, label, of_label.to(grad.dtype)).to(dtype)
            grad_x[begin : begin + chunk] = (grad @ W) * valid[:, None]
            grad_W += grad.T @ (x_c * valid[:, None])
            del grad  # before the next chunk's logits
        if differentiate:
            ctx.save_for_backward(grad_x, grad_W)
        ctx.mark_non_differentiable(nll)
        return nll + z_loss * squares, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_W = ctx.saved_tensors
        return grad_x * grads[0], grad_W * grads[0], None, None, None, None, None


class SummedLoss(nn.Module):
    """Sum of the losses of a micro-batch's valid tokens.

    The autocast is in here because DeepSpeed switches one off that surrounds its engine.

    Args:
        model: LanguageModel.
        device: where it lies.
        precision: "fp32", or "bf16" for matrix products in bf16.
        z_loss: weight of the squared log-partition.
        chunk_tokens: tokens whose logits exist at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        precision: str,
        z_loss: float = 0.0,
        chunk_tokens: int = 4096,
    ) -> None:
        super().__init__()
        self.model = model
        self.device_type = device.type
        self.bf16 = precision == "bf16"
        self.z_loss = z_loss
        self.chunk_tokens = chunk_tokens

    def forward(
        self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(what to differentiate, nats of all valid tokens)"""

        def head(x: Tensor, weight: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor]:
            with torch.autocast(self.device_type, enabled=False):
                dtype = torch.bfloat16 if self.bf16 else torch.float32
                return _ChunkedCrossEntropy.apply(
                    x.flatten(0, 1),
                    weight,
                    labels.flatten(),
                    soft_cap,
                    self.z_loss,
                    self.chunk_tokens,
                    dtype,
                )

        with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16):
            return self.model(tokens, cu_seqlens=cu_seqlens, head=head)
