"""Log-linear SSD (Mamba-2's rule), as the recurrence that defines it and as a dense mask.

The recurrence is the specification: every faster form must equal it. Guo et al., "Log-Linear
Attention" (arXiv 2506.04761), with levels as in kernels/levels.py.
"""

import torch
from torch import Tensor

from kernels.levels import carry
from kernels.masks import decay_mask, level_mask
from kernels.state import FenwickState


def log_linear_ssd_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    initial_state: FenwickState,
) -> tuple[Tensor, FenwickState]:
    """One token after the other, for each batch row b and head h:

        before token t > 0:  l = lowest set bit of t, plus 1;  S[l] += S[0..l-1];  clear S[0..l-1]
        every level:         S <- exp(g_t) S
        insert:              S[0] = k_t v_t^T
        read:                o_t = sum_l lambda_t[l] * q_t^T S[l]

    Args:
        q, k: [B, T, G, K], H a multiple of G.
        v: [B, T, H, V].
        log_decay: [B, T, H], g, natural logarithm, <= 0.
        level_weights: [B, T, H, L], lambda, >= 0.
        initial_state: levels [B, H, L, K, V]; its position may differ from row to row.

    Returns:
        o [B, T, H, V] and the state after the last token, in the dtype of the state.
    """
    S, position = initial_state.levels, initial_state.position
    T, heads_per_group = q.shape[1], v.shape[2] // q.shape[2]
    q = q.repeat_interleave(heads_per_group, dim=2).to(S)
    k = k.repeat_interleave(heads_per_group, dim=2).to(S)
    v, g, weights = v.to(S), log_decay.to(S), level_weights.to(S)
    outputs = []
    for t in range(T):
        S = carry(S, position + t)
        S = g[:, t].exp()[:, :, None, None, None] * S
        inserted = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        S = torch.cat([inserted[:, :, None], S[:, :, 1:]], dim=2)
        outputs.append(torch.einsum("bhl,bhk,bhlkv->bhv", weights[:, t], q[:, t], S))
    return torch.stack(outputs, dim=1), FenwickState(S, position + T)


def log_linear_ssd_dense(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, level_weights: Tensor
) -> Tensor:
    """The same as one masked matrix, O(T^2), from position 0:

    O = (Q K^T * M^S * M^H) V
    M^S[t,s] = exp(g_{s+1} + ... + g_t),  M^H[t,s] = lambda_t[level(t,s)],  s <= t

    Shapes as in `log_linear_ssd_recurrence`; returns o [B, T, H, V].
    """
    T, heads_per_group = q.shape[1], v.shape[2] // q.shape[2]
    q = q.repeat_interleave(heads_per_group, dim=2)
    k = k.repeat_interleave(heads_per_group, dim=2)
    scores = torch.einsum("bthk,bshk->bhts", q, k)
    weights = scores * decay_mask(log_decay) * level_mask(level_weights, T)
    return torch.einsum("bhts,bshv->bthv", weights, v)
