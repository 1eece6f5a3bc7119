"""python -m pretrain compare RUN_A RUN_B: are two runs one? Step by step, from their log.jsonl.

Compared are the rows read, loss, learning rate, gradient norm and validation loss. With tolerance 0
a run that was killed and resumed with the same number of ranks on a CPU equals the unbroken one.
A step that a log holds twice, or lacks between others, is a difference too.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.metrics import LOG_NAME

TIMES = "times in the log"
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
    beyond: tuple[int, int]
    """How many steps each run has outside the range that both have."""


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
    between = range(common[0], common[-1] + 1)
    for step in between:
        x, y = left.get(step, {TIMES: 0}), right.get(step, {TIMES: 0})
        if difference is None and (x[TIMES], y[TIMES]) != (1, 1):
            difference = Difference(step, TIMES, x[TIMES], y[TIMES])
        for name in COMPARED:
            gap = _gap(x.get(name), y.get(name))
            if name in largest and math.isfinite(gap):
                largest[name] = max(largest[name], gap)
            if gap > tolerance and difference is None:
                difference = Difference(step, name, x.get(name), y.get(name))
    beyond = (len(left.keys() - between), len(right.keys() - between))
    return Comparison(len(common), common[0], common[-1], difference, largest, beyond)


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
            known = steps.setdefault(numbers["step"], {TIMES: 0})
            known |= numbers | {TIMES: known[TIMES] + ("loss" in numbers)}
    return steps


def _gap(x: Any, y: Any) -> float:
    """Relative difference of two numbers; 0 or infinity for anything else."""
    if isinstance(x, float | int) and isinstance(y, float | int):
        return abs(x - y) / max(abs(x), abs(y), 1e-300) if x != y else 0.0
    return 0.0 if x == y else math.inf


def _range(steps: dict[int, dict[str, Any]]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no step"
