"""flash-linear-attention's models in the shape of ours: its layers, norms and MLP, fused as its
users run them, in our skeleton, for `python -m pretrain bench --against fla`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.fla_library import fla_is_there, prepare_import
from models.config import ModelConfig


def fla_model(config: ModelConfig) -> nn.Module:
    """A model of FLA's layers, initialised as they initialise themselves.

    Raises:
        ValueError: FLA is not installed, or has no such mixer.
        ImportError: it cannot be imported.
    """
    check_installed()
    mixers = set(config.layer_mixers)
    if missing := mixers - set(_LAYERS):
        raise ValueError(
            f"flash-linear-attention has no such mixer: got {', '.join(sorted(missing))}; expected "
            f"some of {', '.join(_LAYERS)}"
        )
    prepare_import()
    return _Model(config)


def check_installed() -> None:
    """ValueError where FLA is not there."""
    if not fla_is_there():
        raise ValueError(
            "--against fla needs flash-linear-attention: got an environment without it; expected "
            "one with it; pip install flash-linear-attention"
        )


class _Block(nn.Module):
    def __init__(self, config: ModelConfig, mixer: str, index: int) -> None:
        from fla.modules import GatedMLP, RMSNorm

        super().__init__()
        D = config.d_model
        self.mixer_norm = RMSNorm(D, eps=config.norm_eps)
        self.mixer = _LAYERS[mixer](config, index)
        self.mlp_norm = RMSNorm(D, eps=config.norm_eps)
        self.mlp = GatedMLP(D, intermediate_size=config.mlp.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        # As its own models do: the norm adds the residual stream in the same kernel.
        y = self.mixer(self.mixer_norm(x))[0]
        y, x = self.mlp_norm(y, x, True)
        return x + self.mlp(y)


class _Model(nn.Module):
    """What SummedLoss asks of a model."""

    def __init__(self, config: ModelConfig) -> None:
        from fla.modules import RMSNorm

        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        mixers = enumerate(config.layer_mixers)
        self.blocks = nn.ModuleList(_Block(config, mixer, i) for i, mixer in mixers)
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None,
        head: Callable[[Tensor, Tensor, float | None], Any],
    ) -> Any:
        assert cu_seqlens is None, "rows of the bench are one document each"
        with torch.autocast(tokens.device.type, enabled=False):  # all of it is bf16 already
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            x = self.norm(x)
        return head(x, self.lm_head.weight, None)


def _mamba2(config: ModelConfig, index: int, log_linear: bool) -> nn.Module:
    from fla.layers import Mamba2
    from fla.layers.log_linear_mamba2 import LogLinearMamba2

    sizes = config.mamba2
    layer = LogLinearMamba2 if log_linear else Mamba2
    return layer(
        num_heads=config.mamba2_num_heads,
        head_dim=sizes.head_size,
        hidden_size=config.d_model,
        state_size=sizes.state_size,
        expand=sizes.expand,
        n_groups=sizes.num_groups,
        conv_kernel=sizes.conv_width,
        use_conv_bias=True,
        use_bias=False,
        norm_eps=config.norm_eps,
        layer_idx=index,
    )


def _gated_deltanet(config: ModelConfig, index: int) -> nn.Module:
    from fla.layers import GatedDeltaNet

    sizes = config.gated_deltanet
    return GatedDeltaNet(
        hidden_size=config.d_model,
        expand_v=sizes.value_size / sizes.key_size,
        head_dim=sizes.key_size,
        num_heads=sizes.num_heads,
        conv_size=sizes.conv_width,
        norm_eps=config.norm_eps,
        layer_idx=index,
    )


def _attention(config: ModelConfig, index: int) -> nn.Module:
    from fla.layers import Attention

    sizes = config.attention
    return Attention(
        hidden_size=config.d_model,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.kv_heads,
        qk_norm=sizes.qk_norm,
        window_size=sizes.window,
        rope_theta=sizes.rope_theta,
        layer_idx=index,
    )


_LAYERS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "log_linear_mamba2": lambda config, index: _mamba2(config, index, log_linear=True),
    "mamba2": lambda config, index: _mamba2(config, index, log_linear=False),
    "gated_deltanet": _gated_deltanet,
    "attention": _attention,
}
