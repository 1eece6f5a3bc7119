"""Log-linear gated delta rule, as the recurrence that defines it and as a dense mask.

The recurrence is the specification: every faster form must equal it. Guo et al., "Log-Linear
Attention" (arXiv 2506.04761), on the rule of Yang et al., "Gated Delta Networks"; levels as in
kernels/levels.py.
"""

import torch
from torch import Tensor

from kernels.levels import carry
from kernels.masks import decay_mask, level_mask
from kernels.state import FenwickState


def log_linear_gated_delta_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    initial_state: FenwickState,
) -> tuple[Tensor, FenwickState]:
    """One token after the other, for each batch row b and head h:

        before token t > 0:  l = lowest set bit of t, plus 1;  S[l] += S[0..l-1];  clear S[0..l-1]
        every level:         S <- exp(g_t) (I - beta_t k_t k_t^T) S
        insert:              S[0] = beta_t k_t v_t^T
        read:                o_t = sum_l lambda_t[l] * q_t^T S[l]

    Args:
        q, k: [B, T, G, K], H a multiple of G; the rule contracts where |k_t| <= 1.
        v: [B, T, H, V].
        log_decay: [B, T, H], g, natural logarithm, <= 0.
        beta: [B, T, H], in [0, 1].
        level_weights: [B, T, H, L], lambda, >= 0.
        initial_state: levels [B, H, L, K, V]; its position may differ from row to row.

    Returns:
        o [B, T, H, V] and the state after the last token, in the dtype of the state.
    """
    S, position = initial_state.levels, initial_state.position
    T, heads_per_group = q.shape[1], v.shape[2] // q.shape[2]
    q = q.repeat_interleave(heads_per_group, dim=2).to(S)
    k = k.repeat_interleave(heads_per_group, dim=2).to(S)
    v, g, beta, weights = v.to(S), log_decay.to(S), beta.to(S), level_weights.to(S)
    outputs = []
    for t in range(T):
        S = carry(S, position + t)
        beta_k = beta[:, t, :, None] * k[:, t]
        held = torch.einsum("bhj,bhljv->bhlv", k[:, t], S)
        erased = torch.einsum("bhk,bhlv->bhlkv", beta_k, held)
        S = g[:, t].exp()[:, :, None, None, None] * (S - erased)
        inserted = torch.einsum("bhk,bhv->bhkv", beta_k, v[:, t])
        S = torch.cat([inserted[:, :, None], S[:, :, 1:]], dim=2)
        outputs.append(torch.einsum("bhl,bhk,bhlkv->bhv", weights[:, t], q[:, t], S))
    return torch.stack(outputs, dim=1), FenwickState(S, position + T)


def log_linear_gated_delta_dense(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, level_weights: Tensor
) -> Tensor:
    """The same as one masked matrix, O(T^3), from position 0:

    O = (tril(Q K^T) (I + tril(diag(beta) K K^T, -1))^-1 * M^S * M^H) diag(beta) V

    with M^S and M^H as in `log_linear_ssd_dense`. Shapes as in the recurrence; returns
    o [B, T, H, V].
    """
    T, heads_per_group = q.shape[1], v.shape[2] // q.shape[2]
    q = q.repeat_interleave(heads_per_group, dim=2)
    k = k.repeat_interleave(heads_per_group, dim=2)
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    beta = beta.transpose(1, 2)[..., None]  # [B, H, T, 1]
    overlap = (beta * torch.einsum("bthk,bshk->bhts", k, k)).tril(-1)
    inverse = torch.linalg.inv(overlap + torch.eye(T, dtype=q.dtype, device=q.device))
    weights = (scores @ inverse) * decay_mask(log_decay) * level_mask(level_weights, T)
    return torch.einsum("bhts,bhs,bshv->bthv", weights, beta[..., 0], v)
