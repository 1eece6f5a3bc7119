"""A trace of some updates of rank 0, for chrome://tracing or Perfetto: profile.steps=10-12."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.config import RunConfig

PROFILE_FOLDER = "profile"


class Profiler:
    """Starts and stops torch's profiler around the steps of the setting; costs nothing outside."""

    def __init__(self, config: RunConfig, rank: int, device: torch.device) -> None:
        self._bounds = config.profile.bounds if rank == 0 else None
        self._folder = config.run_dir / PROFILE_FOLDER
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: Any = None
        self._first = 0

    def step_begins(self, step: int) -> None:
        """Starts at the first of the updates, or where a run goes on in their midst."""
        if self._bounds and self._running is None and self._bounds[0] <= step <= self._bounds[1]:
            self._first = step
            self._running = profile(activities=self._activities)
            self._running.start()

    def step_ends(self, step: int) -> None:
        """Writes RUN/profile/steps-FIRST-LAST.json after the last of them."""
        if self._bounds and step == self._bounds[1]:
            self.close(step)

    def close(self, step: int) -> None:
        """Writes the trace that is under way, if one is: `step` was its last update."""
        if self._running is None:
            return
        self._running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{self._first}-{step}.json"
        self._running.export_chrome_trace(str(path))
        self._running = None
