"""Every parameter's starting value, in one place."""

import hashlib
import math

import torch
from torch import Tensor, nn

from models.language_model import LanguageModel
from models.level_weights import LevelWeights
from models.mamba2 import Mamba2

DELTA_MIN, DELTA_MAX = 1e-3, 0.1
"""Step size at the start."""
LAMBDA_BIAS = 0.54
"""softplus(0.54) = 0.999: adaptive level weights start at 1, like the linear parent."""
FIXED_LAMBDA = math.log(math.e - 1)
"""softplus of it is 1."""

_RESIDUAL_OUTPUTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")


@torch.no_grad()
def initialize(model: LanguageModel, seed: int) -> None:
    """Fills every parameter of `model`; values depend on seed, name and shape alone.

        projections, embedding     N(0, init_std^2)
        ... into the residual      N(0, init_std^2 / r), r of them    (rescale_residual_init)
        norms, D                   1
        short convolution          weight U(-w, w), w = 1 / sqrt(width);   bias 0
        A_log                      Mamba-2: log(1..H);   Gated DeltaNet: log max(U(0, 16), 1e-4)
        dt_bias                    softplus^-1 of a step size that is log-uniform in [1e-3, 0.1]
        level_weights, adaptive    W1 Xavier normal, W2 = 0, b = 0.54         lambda = 0.999
        level_weights, linear      a = 1                                      lambda near 0.69
        level_weights, fixed       a = log(e - 1)                             lambda = 1

    With softmax over the levels instead of softplus, lambda starts at or near 1 / L. A name not
    listed here is an error: no parameter starts from uninitialised memory, none is written twice.

    Args:
        seed: any integer. Two models with the same seed agree in all parameters that they share by
            name and shape.

    Raises:
        ValueError: the model has a parameter without a rule.
    """
    config = model.config
    residual_outputs = sum(name.endswith(_RESIDUAL_OUTPUTS) for name, _ in model.named_parameters())
    for module_name, module in model.named_modules():
        for short_name, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{short_name}" if module_name else short_name
            random = parameter_random(seed, name)
            std = config.init_std
            if config.rescale_residual_init and name.endswith(_RESIDUAL_OUTPUTS):
                std /= math.sqrt(residual_outputs)
            parameter.copy_(_start(name, short_name, module, parameter, std, random))


def _start(
    name: str,
    short_name: str,
    module: nn.Module,
    parameter: Tensor,
    std: float,
    random: torch.Generator,
) -> Tensor:
    value = torch.empty(
        parameter.shape
    )  # on the CPU, so that every device starts from the same numbers
    if isinstance(module, LevelWeights):
        return _level_weights_start(short_name, module, value, random)
    if name.endswith("norm.weight") or short_name == "D":
        return value.fill_(1)
    if name.endswith(("_proj.weight", "lm_head.weight", "embedding.weight")):
        return value.normal_(0, std, generator=random)
    if name.endswith("conv.weight"):
        bound = value.shape[1] ** -0.5
        return value.uniform_(-bound, bound, generator=random)
    if name.endswith("conv.bias"):
        return value.zero_()
    if short_name == "A_log":
        if isinstance(module, Mamba2):
            return torch.arange(1, value.numel() + 1, dtype=torch.float32).log()
        return value.uniform_(0, 16, generator=random).clamp(min=1e-4).log()
    if short_name == "dt_bias":
        log_delta = value.uniform_(math.log(DELTA_MIN), math.log(DELTA_MAX), generator=random)
        delta = log_delta.exp()
        return delta + torch.log(-torch.expm1(-delta))  # softplus(this) = delta
    raise ValueError(f"no starting value for parameter {name}: add a rule to models/initialize.py")


def _level_weights_start(
    short_name: str, module: LevelWeights, value: Tensor, random: torch.Generator
) -> Tensor:
    if short_name == "W1":
        return nn.init.xavier_normal_(value, generator=random)
    if short_name == "W2":
        return value.zero_()
    if short_name == "b":
        return value.fill_(LAMBDA_BIAS)
    return value.fill_(1.0 if module.config.kind == "linear" else FIXED_LAMBDA)


def parameter_random(seed: int, name: str) -> torch.Generator:
    """The random numbers that the parameter of this name starts from."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
