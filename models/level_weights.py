"""Lambda: how much a token reads from every level of its memory.

`d_t` is a projection of the layer's input to one number per head and level (the mixer's
`level_proj`). From it

    fixed     lambda = softplus(a[h, l])               a constant per head and level, without d_t
    linear    lambda = softplus(a[h, l] * d_t[h, l])
    adaptive  lambda = softplus(W2 (W1 d_t[h]) + b)    over the level axis, shared by the heads

with softmax over the levels in place of softplus where the configuration says so. Lambda multiplies
reads and never enters the state. Computed in fp32, also under autocast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import LevelWeightsConfig
from models.layers import at_least_fp32


class LevelWeights(nn.Module):
    """The parameters behind lambda of one layer; all fp32, none decayed.

    a [H, L] for fixed and linear; W1 [F, L], W2 [L, F], b [L] for adaptive,
    with F = hidden_factor * L.
    """

    def __init__(self, config: LevelWeightsConfig, num_heads: int, num_levels: int) -> None:
        super().__init__()
        self.config = config
        if config.kind == "adaptive":
            hidden = config.hidden_factor * num_levels
            self.W1 = nn.Parameter(torch.empty(hidden, num_levels))
            self.W2 = nn.Parameter(torch.empty(num_levels, hidden))
            self.b = nn.Parameter(torch.empty(num_levels))
        else:
            self.a = nn.Parameter(torch.empty(num_heads, num_levels))

    @property
    def reads_input(self) -> bool:
        """Whether lambda depends on the token, that is, whether the mixer needs a `level_proj`."""
        return self.config.kind != "fixed"

    def forward(self, d: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Lambda.

        Args:
            d: [*shape, H * L] projection of the layer's input; None for fixed.
            shape: leading axes of the result, (B, T) or (B,).

        Returns:
            [*shape, H, L], >= 0, fp32.
        """
        if d is None:
            logits = self.a.expand(*shape, *self.a.shape)
        else:
            with torch.autocast(d.device.type, enabled=False):
                logits = self._logits(at_least_fp32(d))
        return F.softplus(logits) if self.config.activation == "softplus" else logits.softmax(-1)

    def _logits(self, d: Tensor) -> Tensor:
        if self.config.kind == "linear":
            return self.a * d.unflatten(-1, self.a.shape)
        d = d.unflatten(-1, (-1, self.b.shape[0]))  # [..., H, L]
        if self.config.gelu:
            return F.gelu(d @ self.W1.T) @ self.W2.T + self.b
        # Two linear maps in a row are one, and their product [L, L] is far smaller than the hidden
        # activations [..., H, F].
        return d @ (self.W2 @ self.W1).T + self.b
