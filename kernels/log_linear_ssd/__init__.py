"""Log-linear attention with Mamba-2's scalar decay."""

from kernels.log_linear_ssd.op import (
    log_linear_ssd,
    log_linear_ssd_step,
    log_linear_ssd_step_in_place,
    steps_in_place,
)

__all__ = [
    "log_linear_ssd",
    "log_linear_ssd_step",
    "log_linear_ssd_step_in_place",
    "steps_in_place",
]
