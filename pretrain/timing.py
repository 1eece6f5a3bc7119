"""Where the time of an update goes: waiting for data, forward, backward, step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Seconds by phase since the last `read`; on a GPU by events, which make nothing wait: a phase
    that the GPU has not ended by then is in the next `read`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`."""
        if self._on_gpu:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            self._events.append((name, began, ended))
            return
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase, and starts anew."""
        while self._events and self._events[0][2].query():
            name, began, ended = self._events.pop(0)
            self.add(name, began.elapsed_time(ended) / 1000)
        seconds, self._seconds = self._seconds, {}
        return seconds
