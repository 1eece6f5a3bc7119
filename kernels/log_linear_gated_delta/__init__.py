"""Log-linear attention with the gated delta rule."""

from kernels.log_linear_gated_delta.op import (
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
    log_linear_gated_delta_rule_step_in_place,
)
from kernels.log_linear_gated_delta.pending_state import PendingFenwickState

__all__ = [
    "PendingFenwickState",
    "log_linear_gated_delta_rule",
    "log_linear_gated_delta_rule_step",
    "log_linear_gated_delta_rule_step_in_place",
]
