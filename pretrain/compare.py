"""python -m pretrain compare RUN_A RUN_B: are two runs one? Step by step, from their log.jsonl.

Compared are the rows read, loss, learning rate, gradient norm and validation loss. With tolerance 0
a run that was killed and resumed with the same number of ranks on a CPU equals the unbroken one.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.metrics import LOG_NAME

COMPARED = ("rows", "verdict", "loss", "lr", "grad_norm", "validation_loss")


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part."""

    step: int
    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Comparison:
    """What was compared: steps that both runs hold, and the first difference if any."""

    steps: int
    first: int
    last: int
    difference: Difference | None
    largest: dict[str, float]
    """Largest relative difference of every number."""


def compare_runs(a: Path, b: Path, tolerance: float = 0.0) -> Comparison:
    """Compares two run folders.

    Args:
        tolerance: relative difference up to which two numbers count as equal.

    Raises:
        FileNotFoundError: a folder has no log.jsonl.
        ValueError: the runs have no step in common.
    """
    left, right = _steps(a), _steps(b)
    common = sorted(left.keys() & right.keys())
    if not common:
        raise ValueError(
            f"runs have no step in common: got {_range(left)} in {a} and {_range(right)} in {b}; "
            "expected runs of the same steps"
        )
    difference, largest = None, dict.fromkeys(COMPARED[2:], 0.0)
    for step in common:
        for name in COMPARED:
            x, y = left[step].get(name), right[step].get(name)
            gap = _gap(x, y)
            if name in largest and math.isfinite(gap):
                largest[name] = max(largest[name], gap)
            if gap > tolerance and difference is None:
                difference = Difference(step, name, x, y)
    return Comparison(len(common), common[0], common[-1], difference, largest)


def _steps(run: Path) -> dict[int, dict[str, Any]]:
    path = run / LOG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"no run: got {run} without {LOG_NAME}; expected a run folder")
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            numbers = json.loads(line)
        except ValueError:
            continue  # half a line: the run was killed, or is being written
        if "loss" in numbers or "validation_loss" in numbers:
            steps.setdefault(numbers["step"], {}).update(numbers)
    return steps


def _gap(x: Any, y: Any) -> float:
    """Relative difference of two numbers; 0 or infinity for anything else."""
    if isinstance(x, float | int) and isinstance(y, float | int):
        return abs(x - y) / max(abs(x), abs(y), 1e-300) if x != y else 0.0
    return 0.0 if x == y else math.inf


def _range(steps: dict[int, dict[str, Any]]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no step"
