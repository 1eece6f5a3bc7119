"""The public surface of log-linear SSD: checks, choice of backend, the one-token step."""

import torch
from torch import Tensor

from kernels.checks import check_levels, check_sequence, check_step, document_lengths
from kernels.dispatch import Backend, choose_backend, triton_interprets
from kernels.documents import run_by_document
from kernels.log_linear_ssd.between_states import log_linear_ssd_with_states
from kernels.log_linear_ssd.chunked import log_linear_ssd_chunked
from kernels.log_linear_ssd.reference import log_linear_ssd_recurrence
from kernels.state import FenwickState, LazyFenwickState, live_part, with_live_part


def log_linear_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: FenwickState | None = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, FenwickState | None]:
    """Log-linear attention with Mamba-2's scalar decay.

        S[l] <- exp(g_t) S[l] for every level l, after the carry;   S[0] = k_t v_t^T
        o_t = sum_l lambda_t[l] * q_t^T S[l]

    Guo et al., arXiv 2506.04761; the recurrence in full is reference.py, the levels levels.py.
    With lambda = 1 on all levels this is Mamba-2's SSD (q = C, k = B, v = x dt, g = A dt).

    Args:
        q, k: [B, T, G, K], bf16, fp16, fp32 or fp64; H is a multiple of G.
        v: [B, T, H, V].
        log_decay: [B, T, H], g, natural logarithm, <= 0; fp32.
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
    check_sequence(q, k, v, {"log_decay": log_decay}, level_weights)
    obstacle = _triton_obstacle(q, k, v)
    chosen = choose_backend(backend, v.device, "log_linear_ssd", obstacle)
    inputs = (q, k, v, log_decay, level_weights)
    if chosen == "triton" and initial_state is None and not return_final_state:
        from kernels.log_linear_ssd.triton_op import log_linear_ssd_triton

        return log_linear_ssd_triton(*inputs, cu_seqlens), None
    lengths = document_lengths(q.shape[0], q.shape[1], cu_seqlens)
    check_levels(level_weights, lengths, initial_state, q.shape[3], v.shape[3])
    # Autocast would cast the products inside to bf16; the operator promises fp32.
    final_state: FenwickState | None
    with torch.autocast(v.device.type, enabled=False):
        if chosen == "reference":
            o, final_state = run_by_document(
                log_linear_ssd_recurrence, inputs, lengths, initial_state
            )
        elif chosen == "triton":
            o, final_state = log_linear_ssd_with_states(
                *inputs, lengths, initial_state, return_final_state
            )
        else:
            o, final_state = log_linear_ssd_chunked(
                *inputs, lengths, initial_state, return_final_state
            )
    return o.to(v.dtype), final_state if return_final_state else None


def steps_in_place(K: int, V: int, L: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `log_linear_ssd_step_in_place` takes q, k, v and states like these."""
    there = device.type == "cuda" or triton_interprets()
    return there and L <= 32 and _obstacle(K, V, {dtype}) is None


def _triton_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return _obstacle(q.shape[3], v.shape[3], {q.dtype, k.dtype, v.dtype})


def _obstacle(K: int, V: int, dtypes: set[torch.dtype]) -> str | None:
    if K % 16 or K > 256:
        return f"its Triton kernels need K a multiple of 16 up to 256: got {K}"
    if V % 16 or V > 256:
        return f"its Triton kernels need V a multiple of 16 up to 256: got {V}"
    if len(dtypes) > 1 or torch.float64 in dtypes:
        return f"its Triton kernels need one of bf16, fp16, fp32: got {sorted(map(str, dtypes))}"
    return None


def log_linear_ssd_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    state: FenwickState,
) -> tuple[Tensor, FenwickState]:
    """One token of `log_linear_ssd` for each of B rows, each at its own position.

    Args:
        q, k: [B, G, K];  v: [B, H, V];  log_decay: [B, H];  level_weights: [B, H, L].
        state: levels [B, H, L, K, V]; it is not changed.

    Returns:
        o [B, H, V] in v's dtype and the state after the token.

    Raises:
        ValueError: a shape does not fit; the state's position needs more than L levels (not
            checked where the position is on a device, see kernels/state.py).
    """
    q, k, v, log_decay, level_weights = (x[:, None] for x in (q, k, v, log_decay, level_weights))
    check_sequence(q, k, v, {"log_decay": log_decay}, level_weights)
    check_step(level_weights, state, q.shape[3], v.shape[3])
    live, live_weights = live_part(state, level_weights)
    with torch.autocast(v.device.type, enabled=False):
        o, live = log_linear_ssd_recurrence(q, k, v, log_decay, live_weights, live)
    return o[:, 0].to(v.dtype), with_live_part(state, live)


def log_linear_ssd_step_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    state: LazyFenwickState,
) -> Tensor:
    """`log_linear_ssd_step` that changes `state` and returns o alone: one Triton kernel that moves
    the live levels once. It asks the device nothing, so a CUDA graph can hold it; that the levels
    suffice for the position is its caller's to know. No gradients.

    Args:
        q, k: [B, G, K];  v: [B, H, V];  log_decay: [B, H];  level_weights: [B, H, L], L <= 32.
        state: levels [B, H, L, K, V].

    Raises:
        ValueError: a shape does not fit, or the kernels cannot take these sizes or this device.
    """
    rows = q[:, None], k[:, None], v[:, None]
    check_sequence(*rows, {"log_decay": log_decay[:, None]}, level_weights[:, None])
    choose_backend("triton", v.device, "log_linear_ssd", _triton_obstacle(*rows))
    B, H, L = level_weights.shape
    FenwickState(state.levels, state.position).check(B, H, L, q.shape[2], v.shape[2])
    from kernels.log_linear_ssd.triton_step import log_linear_ssd_step_triton

    with torch.no_grad():
        return log_linear_ssd_step_triton(q, k, v, log_decay, level_weights, state)
