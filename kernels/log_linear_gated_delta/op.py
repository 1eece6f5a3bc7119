"""The public surface of the log-linear gated delta rule: checks, backend, the one-token step."""

import torch
from torch import Tensor

from kernels.checks import check_levels, check_sequence, check_step, document_lengths
from kernels.dispatch import Backend, choose_backend
from kernels.documents import run_by_document
from kernels.log_linear_gated_delta.between_states import gated_delta_with_states
from kernels.log_linear_gated_delta.chunked import log_linear_gated_delta_chunked
from kernels.log_linear_gated_delta.pending_state import PendingFenwickState
from kernels.log_linear_gated_delta.reference import log_linear_gated_delta_recurrence
from kernels.state import FenwickState, live_part, with_live_part


def log_linear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: FenwickState | None = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, FenwickState | None]:
    """Log-linear attention with the gated delta rule.

        S[l] <- exp(g_t) (I - beta_t k_t k_t^T) S[l] for every level l, after the carry
        S[0] = beta_t k_t v_t^T
        o_t = sum_l lambda_t[l] * q_t^T S[l]

    Guo et al., arXiv 2506.04761; the recurrence in full is reference.py, the levels levels.py.
    With lambda = 1 on all levels this is Gated DeltaNet's rule. q and k are used as given: scale
    and normalise them before.

    Args:
        q, k: [B, T, G, K], bf16, fp16, fp32 or fp64; H is a multiple of G.
        v: [B, T, H, V].
        log_decay: [B, T, H], g, natural logarithm, <= 0; fp32.
        beta: [B, T, H], in [0, 1].
        level_weights: [B, T, H, L], lambda, >= 0; L >= num_levels(longest row), counted from the
            row's first token, `initial_state` included.
        cu_seqlens: [N+1] integers from 0 to T, needs B = 1: N packed documents, each with a tree
            of its own.
        initial_state: what was read before, one entry for each row or document.
        return_final_state: also return the state after each row or document.
        backend: see kernels/dispatch.py.

    Returns:
        o [B, T, H, V] in v's dtype, accumulated in fp32 (fp64 for fp64), and the final state or
        None. Gradients flow to all tensors and through the live levels of `initial_state`.

    Raises:
        ValueError: a shape, dtype, device, cu_seqlens or backend does not fit; too few levels.
    """
    check_sequence(q, k, v, {"log_decay": log_decay, "beta": beta}, level_weights)
    obstacle = _gated_delta_obstacle(q, k, v)
    chosen = choose_backend(backend, v.device, "log_linear_gated_delta_rule", obstacle)
    inputs = (q, k, v, log_decay, beta, level_weights)
    # Autocast would cast the products inside to bf16; the operator promises fp32.
    final_state: FenwickState | None
    if chosen == "triton" and initial_state is None and not return_final_state:
        from kernels.log_linear_gated_delta.triton_op import log_linear_gated_delta_triton

        return log_linear_gated_delta_triton(*inputs, cu_seqlens)[0], None
    lengths = document_lengths(q.shape[0], q.shape[1], cu_seqlens)
    check_levels(level_weights, lengths, initial_state, q.shape[3], v.shape[3])
    with torch.autocast(v.device.type, enabled=False):
        if chosen == "reference":
            o, final_state = run_by_document(
                log_linear_gated_delta_recurrence, inputs, lengths, initial_state
            )
        elif chosen == "triton":
            o, final_state = gated_delta_with_states(
                *inputs, lengths, initial_state, return_final_state
            )
        else:
            o, final_state = log_linear_gated_delta_chunked(
                *inputs, lengths, initial_state, return_final_state
            )
    return o.to(v.dtype), final_state if return_final_state else None


def _gated_delta_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    K, V = q.shape[3], v.shape[3]
    if K > 256 or V > 512:
        return f"its Triton kernels need K up to 256 and V up to 512: got K={K}, V={V}"
    if not q.dtype == k.dtype == v.dtype or v.dtype == torch.float64:
        return f"its Triton kernels need one of bf16, fp16, fp32: got {q.dtype, k.dtype, v.dtype}"
    return None


def log_linear_gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    state: FenwickState,
) -> tuple[Tensor, FenwickState]:
    """One token of `log_linear_gated_delta_rule` for each of B rows, each at its own position.

    Args:
        q, k: [B, G, K];  v: [B, H, V];  log_decay, beta: [B, H];  level_weights: [B, H, L].
        state: levels [B, H, L, K, V]; it is not changed.

    Returns:
        o [B, H, V] in v's dtype and the state after the token.

    Raises:
        ValueError: a shape does not fit; the state's position needs more than L levels (not
            checked where the position is on a device, see kernels/state.py).
    """
    q, k, v, log_decay, beta, level_weights = (
        x[:, None] for x in (q, k, v, log_decay, beta, level_weights)
    )
    check_sequence(q, k, v, {"log_decay": log_decay, "beta": beta}, level_weights)
    check_step(level_weights, state, q.shape[3], v.shape[3])
    live, live_weights = live_part(state, level_weights)
    with torch.autocast(v.device.type, enabled=False):
        o, live = log_linear_gated_delta_recurrence(q, k, v, log_decay, beta, live_weights, live)
    return o[:, 0].to(v.dtype), with_live_part(state, live)


def log_linear_gated_delta_rule_step_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    state: PendingFenwickState,
) -> Tensor:
    """`log_linear_gated_delta_rule_step` that changes `state` and returns o alone: one pass
    of Triton kernels over the live levels. It asks the device nothing, so a CUDA graph can hold it;
    that the levels suffice for the position is its caller's to know. No gradients.

    Args:
        q, k: [B, G, K];  v: [B, H, V];  log_decay, beta: [B, H];  level_weights: [B, H, L].
        state: levels [B, H, L, K, V], L <= 32; made by PendingFenwickState.of.

    Raises:
        ValueError: a shape does not fit, or the kernels cannot take these sizes or this device.
    """
    rows = q[:, None], k[:, None], v[:, None]
    per_head = {"log_decay": log_decay[:, None], "beta": beta[:, None]}
    check_sequence(*rows, per_head, level_weights[:, None])
    obstacle = _gated_delta_obstacle(*rows)
    choose_backend("triton", v.device, "log_linear_gated_delta_rule", obstacle)
    B, H, L = level_weights.shape
    FenwickState(state.levels, state.position).check(B, H, L, q.shape[2], v.shape[2])
    from kernels.log_linear_gated_delta.triton_step import gated_delta_step_triton

    with torch.no_grad():
        return gated_delta_step_triton(q, k, v, log_decay, beta, level_weights, state)
