"""How long one decoding step takes, beside the time that memory alone needs for its states."""

import torch
import torch.nn.functional as F

from kernels.bench import graph_ms, hardware, time_ms
from kernels.bench_cases import Sizes
from kernels.levels import num_levels
from kernels.log_linear_gated_delta import (
    PendingFenwickState,
    log_linear_gated_delta_rule_step_in_place,
)
from kernels.log_linear_ssd import log_linear_ssd_step_in_place
from kernels.state import FenwickState, LazyFenwickState


def bench_step(op: str, sizes: Sizes, position: int) -> str:
    """One line: milliseconds of the step at `position`, bytes of its live states, their ratio.

    On a GPU the step is timed as a CUDA graph, as a decoder runs it. Memory's rate is that of
    copying a buffer as large, which reads and writes every byte.
    """
    s, L = sizes, num_levels(position + 1)
    state = FenwickState.empty(s.B, s.H, L, s.K, s.V, device=s.device)
    q, k = (torch.randn(s.B, s.G, s.K, device=s.device, dtype=s.dtype) for _ in range(2))
    v = torch.randn(s.B, s.H, s.V, device=s.device, dtype=s.dtype)
    log_decay = -torch.rand(s.B, s.H, device=s.device)
    level_weights = F.softplus(torch.randn(s.B, s.H, L, device=s.device))
    k, beta = F.normalize(k, dim=-1), torch.rand(s.B, s.H, device=s.device)

    lazy, pending = LazyFenwickState.of(state), PendingFenwickState.of(state)

    def step() -> None:
        if op == "ssd":
            lazy.position.fill_(position)
            log_linear_ssd_step_in_place(q, k, v, log_decay, level_weights, lazy)
        else:
            pending.position.fill_(position)
            log_linear_gated_delta_rule_step_in_place(
                q, k, v, log_decay, beta, level_weights, pending
            )

    step_ms = graph_ms(step, s.device) if s.device.type == "cuda" else time_ms(step, s.device)
    assert step_ms is not None  # the steps promise to fit in a graph
    live = position.bit_count()
    live_bytes = live * s.B * s.H * s.K * s.V * 4
    buffer = torch.empty(max(live_bytes, 1 << 28) // 4, device=s.device)
    copy_ms = time_ms(lambda: buffer.clone(), s.device)
    rate = 2 * 4 * buffer.numel() / copy_ms / 1e6
    moved_ms = live_bytes / rate / 1e6
    return (
        f"{hardware(s.device)}: step {step_ms:.3f} ms at batch {s.B}, position {position}; "
        f"{live} live levels = {live_bytes / 1e6:.0f} MB, {moved_ms:.3f} ms at "
        f"{rate:.0f} GB/s; ratio {step_ms / moved_ms:.2f}"
    )
