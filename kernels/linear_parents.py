"""The operators of the linear parents, whose one state is read as it is: o_t = q_t^T S.

    linear_ssd         S <- exp(g_t) S + k_t v_t^T                                   Mamba-2
    gated_delta_rule   S <- exp(g_t) (I - beta_t k_t k_t^T) S + beta_t k_t v_t^T     Gated DeltaNet

On a GPU they are flash-linear-attention's where that is installed, so that baselines are as fast as
their users know them; else the log-linear operator with weight 1 on every level, which is the same.
"""

from typing import Literal

import torch
from torch import Tensor

from kernels.checks import document_lengths
from kernels.dispatch import is_fake, log_choice
from kernels.fla_library import fla_function, fla_is_there, fla_obstacle
from kernels.host_tables import on_device
from kernels.levels import num_levels
from kernels.log_linear_gated_delta import log_linear_gated_delta_rule
from kernels.log_linear_ssd import log_linear_ssd

Library = Literal["auto", "fla", "own"]
FLA_KEY_SIZE = 256
"""Of FLA's kernels."""


def linear_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    library: Library = "auto",
) -> Tensor:
    """o [B, T, H, V] of whole documents; arguments as those of log_linear_ssd.

    Raises:
        ValueError: FLA is asked for and cannot take these inputs, or is not there.
    """
    if _is_fla(library, q, k, v, "linear_ssd"):
        chunk_simple_gla = fla_function("fla.ops.simple_gla", "chunk_simple_gla")
        # It has a key and a query for every head.
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        o: Tensor = chunk_simple_gla(q, k, v, log_decay, scale=1.0, **_documents(v, cu_seqlens))[0]
        return o
    weights = _unit_weights(log_decay, cu_seqlens)
    return log_linear_ssd(q, k, v, log_decay, weights, cu_seqlens=cu_seqlens)[0]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    library: Library = "auto",
) -> Tensor:
    """o [B, T, H, V] of whole documents; arguments as those of log_linear_gated_delta_rule.

    Raises:
        ValueError: FLA is asked for and cannot take these inputs, or is not there.
    """
    if _is_fla(library, q, k, v, "gated_delta_rule"):
        chunk_rule = fla_function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
        o: Tensor = chunk_rule(q, k, v, log_decay, beta, scale=1.0, **_documents(v, cu_seqlens))[0]
        return o
    weights = _unit_weights(log_decay, cu_seqlens)
    return log_linear_gated_delta_rule(q, k, v, log_decay, beta, weights, cu_seqlens=cu_seqlens)[0]


def _is_fla(library: Library, q: Tensor, k: Tensor, v: Tensor, operator: str) -> bool:
    """Whether FLA's kernels run."""
    obstacle = None
    if not fla_is_there():
        obstacle = "it is not installed; pip install flash-linear-attention"
    elif v.device.type != "cuda":
        obstacle = f"its kernels need a CUDA device: tensors are on {v.device.type}"
    elif not q.dtype == k.dtype == v.dtype or v.dtype not in (torch.bfloat16, torch.float16):
        obstacle = f"its kernels need one of bf16, fp16: got {q.dtype, k.dtype, v.dtype}"
    elif q.shape[-1] > FLA_KEY_SIZE:
        obstacle = f"its kernels need K up to {FLA_KEY_SIZE}: got {q.shape[-1]}"
    elif not is_fake(v):
        obstacle = fla_obstacle(v.device)
    if library == "fla" and obstacle is not None:
        raise ValueError(f'{operator}: library="fla": {obstacle}; use library="own"')
    chosen = library == "fla" or (library == "auto" and obstacle is None)
    if not is_fake(v):
        log_choice(operator, v.device.type, f"library {'fla' if chosen else 'own'}")
    return chosen


def _documents(v: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """FLA's arguments for packed documents; with theirs on the CPU it asks the device nothing."""
    if cu_seqlens is None:
        return {}
    return {"cu_seqlens": on_device(cu_seqlens, v.device), "cu_seqlens_cpu": cu_seqlens}


def _unit_weights(log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Ones [B, T, H, L], L enough for the longest document."""
    longest = max(document_lengths(log_decay.shape[0], log_decay.shape[1], cu_seqlens))
    return log_decay.new_ones(()).expand(*log_decay.shape, num_levels(longest))
