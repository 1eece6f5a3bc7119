"""Learning rate of every step: a pure function, so a resumed run needs no scheduler state."""

import math

from pretrain.sections import ScheduleConfig


def learning_rate(step: int, schedule: ScheduleConfig, peak_lr: float, total_steps: int) -> float:
    """Learning rate of update `step`, counted from 1 to total_steps.

        warmup    peak * step / warmup_steps                      while step <= warmup_steps
        constant  peak
        cosine    final + (peak - final) * (1 + cos(pi x)) / 2    x from 0 to 1 after the warmup
        wsd       peak, then peak + (final - peak) * x            x from 0 to 1 in decay_steps

    with final = peak * final_lr_fraction, reached exactly at total_steps.

    Raises:
        ValueError: step lies outside the run.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step lies outside the run: got {step}; expected 1 to {total_steps}")
    if step <= schedule.warmup_steps:
        return peak_lr * step / schedule.warmup_steps
    final_lr = peak_lr * schedule.final_lr_fraction
    if schedule.kind == "cosine":
        progress = (step - schedule.warmup_steps) / (total_steps - schedule.warmup_steps)
        return final_lr + (peak_lr - final_lr) * (1 + math.cos(math.pi * progress)) / 2
    if schedule.decay_steps is not None:
        start = total_steps - schedule.decay_steps
        return peak_lr + (final_lr - peak_lr) * max(0, step - start) / schedule.decay_steps
    return peak_lr
