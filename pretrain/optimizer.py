"""AdamW over the parameter groups that models/ defines.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    p = p - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay p)

Weight decay acts on the parameters classed for it and on no other; which ones these are is decided
in models/parameter_groups.py, which refuses a parameter it does not know.
"""

from torch import nn
from torch.optim import AdamW

from models.parameter_groups import decays
from pretrain.config import OptimizerConfig


def build_optimizer(model: nn.Module, settings: OptimizerConfig) -> AdamW:
    """AdamW with two groups, "decay" and "no decay"; the learning rate is set at every step.

    Raises:
        ValueError: a parameter of the model has no class.
    """
    parameters = list(model.named_parameters())
    decay = [parameter for name, parameter in parameters if decays(name)]
    no_decay = [parameter for name, parameter in parameters if not decays(name)]
    groups = [
        {"params": decay, "weight_decay": settings.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=settings.peak_lr,
        betas=settings.betas,
        eps=settings.eps,
    )
