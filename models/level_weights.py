"""Lambda: how much a token reads from every level of its memory.

`d_t` is a projection of the layer's input to one number per head and weight (the mixer's
`level_proj`). From it

    fixed     lambda = softplus(a[h, l])               a constant per head and level, without d_t
    linear    lambda = softplus(a[h, l] * d_t[h, l] + offset)     offset is a setting, mostly 0
    adaptive  lambda = softplus(W2 (W1 d_t[h]) + b)    over the level axis, shared by the heads

with softmax over the weights in place of softplus where the configuration says so. Lambda
multiplies reads and never enters the state. Computed in fp32, also under autocast.

There are W weights per head: one for each of L levels or, where levels above `tied_above` are tied,
tied_above + 2, the last of which serves all levels from its own on. A model whose context was
extended (models/extend_context.py) computes the weights it had before apart from the new ones, by
the same products of the same shapes, and adds what new weights contribute to old ones as a further
term: exactly 0 until it is trained. So nothing that it did before changes by a bit.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.fused.gates import level_softplus
from models.config import LevelWeightsConfig, ModelConfig
from models.layers import Linear, at_least_fp32


class LevelProjection(Linear):
    """[..., D] -> [..., H * W], the d_t of all heads; rows of the weight are [H, W] flattened."""

    def __init__(self, config: ModelConfig, num_heads: int) -> None:
        self.sizes = (num_heads, config.num_level_weights)
        self.bounds = (*config.level_weights.grown_from, config.num_level_weights)
        super().__init__(config.d_model, num_heads * config.num_level_weights)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if len(self.bounds) == 1:
            return super().forward(input)
        weight, parts, start = self.weight.unflatten(0, self.sizes), [], 0
        for end in self.bounds:
            part = F.linear(input, weight[:, start:end].reshape(-1, self.in_features))
            parts.append(part.unflatten(-1, (self.sizes[0], end - start)))
            start = end
        return torch.cat(parts, dim=-1).flatten(-2)


class LevelWeights(nn.Module):
    """The parameters behind lambda of one layer; all fp32, none decayed.

    a [H, W] for fixed and linear; W1 [F, W], W2 [W, F], b [W] for adaptive,
    with F = hidden_factor * W.
    """

    def __init__(self, config: LevelWeightsConfig, num_heads: int, num_levels: int) -> None:
        super().__init__()
        self.config, self.num_levels = config, num_levels
        W = config.num_weights(num_levels)
        self.bounds = (*config.grown_from, W)
        if config.kind == "adaptive":
            hidden = config.hidden_factor * W
            self.W1 = nn.Parameter(torch.empty(hidden, W))
            self.W2 = nn.Parameter(torch.empty(W, hidden))
            self.b = nn.Parameter(torch.empty(W))
        else:
            self.a = nn.Parameter(torch.empty(num_heads, W))

    @property
    def reads_input(self) -> bool:
        """Whether lambda depends on the token, that is, whether the mixer needs a `level_proj`."""
        return self.config.kind != "fixed"

    def forward(self, d: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Lambda.

        Args:
            d: [*shape, H * W] projection of the layer's input; None for fixed.
            shape: leading axes of the result, (B, T) or (B,).

        Returns:
            [*shape, H, L], >= 0, fp32.
        """
        if d is None:
            # The same for all tokens: activated once.
            weights = self._activated(self.a.split(self._block_sizes, dim=-1))
            weights = weights.expand(*shape, *weights.shape)
        else:
            with torch.autocast(d.device.type, enabled=False):
                weights = self._of_tokens(d)
        untied = self.num_levels - weights.shape[-1]
        if untied == 0:
            return weights
        return torch.cat([weights, weights[..., -1:].expand(*weights.shape[:-1], untied)], dim=-1)

    def _of_tokens(self, d: Tensor) -> Tensor:
        config = self.config
        plain = not config.gelu and config.activation == "softplus" and len(self.bounds) == 1
        if config.kind == "adaptive" and plain:
            return level_softplus(d.unflatten(-1, (-1, len(self.b))), self.W2 @ self.W1, self.b)
        return self._activated(self._logits(at_least_fp32(d)))

    def _activated(self, blocks: Sequence[Tensor]) -> Tensor:
        # Block by block, contiguous: vectorised functions round the end of an array otherwise.
        softplus = self.config.activation == "softplus"
        active = [F.softplus(x.contiguous()) if softplus else x.softmax(-1) for x in blocks]
        return _joined(active)

    def _logits(self, d: Tensor) -> Sequence[Tensor]:
        """The logits, one tensor for each block of weights."""
        if self.config.kind == "linear":
            logits = self.a * d.unflatten(-1, self.a.shape)
            if self.config.offset:
                logits = logits + self.config.offset
            return logits.split(self._block_sizes, dim=-1)
        d = d.unflatten(-1, (-1, self.b.shape[0]))  # [..., H, W]
        if self.config.gelu:
            return self._two_layers(d)
        starts = (0, *self.bounds[:-1])
        return [self._block(d, *block) for block in zip(starts, self.bounds, strict=True)]

    def _block(self, d: Tensor, start: int, end: int) -> Tensor:
        """Weights start..end-1 as of the time when there were `end`, and what came later.

        Two linear maps in a row are one, and their product [W, W] is far smaller than the hidden
        activations [..., H, F].
        """
        F_end = self.config.hidden_factor * end
        W2_then, W1_then = self.W2[start:end, :F_end], self.W1[:F_end, :end]
        product = W2_then.contiguous() @ W1_then.contiguous()
        logits = d[..., :end].contiguous() @ product.T + self.b[start:end]
        if end == self.b.shape[0]:
            return logits
        later = F.pad(W2_then @ self.W1[:F_end, end:], (end, 0))
        later = later + self.W2[start:end, F_end:] @ self.W1[F_end:]
        return logits + d @ later.T

    def _two_layers(self, d: Tensor) -> Sequence[Tensor]:
        factor = self.config.hidden_factor
        hidden_bounds = tuple(factor * bound for bound in self.bounds)
        hidden = _joined([F.gelu(x) for x in _by_block(d, self.W1, self.bounds, hidden_bounds)])
        blocks = _by_block(hidden, self.W2, hidden_bounds, self.bounds)
        biases = self.b.split(self._block_sizes)
        return [block + bias for block, bias in zip(blocks, biases, strict=True)]

    @property
    def _block_sizes(self) -> list[int]:
        return [end - start for start, end in zip((0, *self.bounds), self.bounds, strict=False)]


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(blocks), dim=-1) if len(blocks) > 1 else blocks[0]


def _by_block(
    x: Tensor, weight: Tensor, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> list[Tensor]:
    """x @ weight.T by blocks: outputs up to outputs[i] first as a product with the inputs up to
    inputs[i], all there were when they were made, then with the later ones."""
    blocks, start = [], 0
    for known, end in zip(inputs, outputs, strict=True):
        y = x[..., :known].contiguous() @ weight[start:end, :known].contiguous().T
        if known < inputs[-1]:
            y = y + x[..., known:] @ weight[start:end, known:].T
        blocks.append(y)
        start = end
    return blocks
