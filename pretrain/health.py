"""Is this update one to take? A rule over agreed numbers, so that all ranks decide alike.

    empty         no label of any rank counts: the update is skipped
    not finite    loss or gradient norm on any rank: the update is skipped
    spike         loss > mean + deviations * standard deviation of the latest taken losses

A skipped update leaves parameters and optimizer as they are; its step counts, so learning rate and
data go on. The state is saved with every checkpoint: a resumed run judges as the unbroken one.
"""

import math
import statistics
from collections import deque
from enum import Enum
from typing import Any

from pretrain.errors import TrainingFailed
from pretrain.sections import HealthConfig


class Verdict(Enum):
    """What becomes of an update."""

    TAKE = "taken"
    SPIKE = "taken, although its loss is a spike"
    SKIP_SPIKE = "skipped: its loss is a spike"
    SKIP_NOT_FINITE = "skipped: loss or gradient is not finite"
    SKIP_EMPTY = "skipped: none of its labels counts"

    @property
    def is_skipped(self) -> bool:
        return self in (Verdict.SKIP_SPIKE, Verdict.SKIP_NOT_FINITE, Verdict.SKIP_EMPTY)


_CALMER = "lower optimizer.peak_lr or lengthen schedule.warmup_steps"
_SKIPS = {
    Verdict.SKIP_SPIKE: ("is a loss spike", _CALMER),
    Verdict.SKIP_NOT_FINITE: ("is not finite", _CALMER),
    Verdict.SKIP_EMPTY: (
        "has no label that counts",
        "look at the labels of the data set, and restore its damaged shards if it has some",
    ),
}
"""What is wrong, and what to do."""


class Health:
    """The latest losses, and how many updates in a row were skipped.

    Args:
        settings: the run's.
        state: what `state` of an earlier one returned.
    """

    def __init__(self, settings: HealthConfig, state: dict[str, Any] | None = None) -> None:
        self.settings = settings
        state = state or {"losses": [], "consecutive_skips": 0}
        self.losses: deque[float] = deque(state["losses"], maxlen=settings.spike_window)
        self.consecutive_skips = int(state["consecutive_skips"])

    @property
    def state(self) -> dict[str, Any]:
        """JSON values; floats come back to the last bit."""
        return {"losses": list(self.losses), "consecutive_skips": self.consecutive_skips}

    def judge(self, loss: float, grad_is_finite: bool = True, valid_tokens: float = 1) -> Verdict:
        """The verdict on an update with this loss; changes nothing."""
        if not valid_tokens:
            return Verdict.SKIP_EMPTY
        if not (math.isfinite(loss) and grad_is_finite):
            return Verdict.SKIP_NOT_FINITE
        if self.settings.spike_action == "off" or not self._is_spike(loss):
            return Verdict.TAKE
        return Verdict.SPIKE if self.settings.spike_action == "log" else Verdict.SKIP_SPIKE

    def record(self, step: int, loss: float, grad_norm: float, verdict: Verdict) -> None:
        """Takes note of the update `step`.

        Raises:
            TrainingFailed: a spike where that is to stop the run, or too many skips in a row.
        """
        if not verdict.is_skipped:
            self.losses.append(loss)
            self.consecutive_skips = 0
            return
        self.consecutive_skips += 1
        numbers = f"got loss {loss}, gradient norm {grad_norm}"
        if verdict is Verdict.SKIP_SPIKE and self.settings.spike_action == "stop":
            raise TrainingFailed(
                f"step {step} is a loss spike: {numbers}; expected at most {self.limit:.4f} "
                "(health.spike_deviations); nothing of it was saved; lower optimizer.peak_lr or "
                "set health.spike_action=skip",
                on_all_ranks=True,
            )
        if self.consecutive_skips >= self.settings.max_consecutive_skips:
            what, remedy = _SKIPS[verdict]
            raise TrainingFailed(
                f"step {step} {what}: {numbers}; {self.consecutive_skips} updates in a row were "
                f"skipped (health.max_consecutive_skips) and nothing of them was saved; {remedy}",
                on_all_ranks=True,
            )

    @property
    def limit(self) -> float:
        """The largest loss that is no spike; infinite until the window is full."""
        if len(self.losses) < self.settings.spike_window:
            return math.inf
        deviation = statistics.pstdev(self.losses)
        return statistics.fmean(self.losses) + self.settings.spike_deviations * deviation

    def _is_spike(self, loss: float) -> bool:
        return loss > self.limit
