"""Measures other ways to launch the Triton kernels and prints the table to commit.

One kernel at a time: every alternative runs forward and backward, its outputs are compared with
those of the committed table, and it is kept where it is right and faster by more than noise.
Nothing is changed on disk: the printed rows go into the operator's launch.py by hand, with their
measurement.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from kernels.bench import hardware, time_ms
from kernels.bench_cases import Case, Sizes, fenwick
from kernels.log_linear_gated_delta.launch import PairShape, PairWay
from kernels.log_linear_ssd.launch import Shape, Way

Table = dict[str, Way] | dict[str, PairWay]

WORTHWHILE = 0.99
TOLERANCE = 2e-2
"""Relative difference of outputs in bf16 between two ways that are both right."""


def tune(op: str, sizes: Sizes, console: Console) -> Table:
    """The best table found for the operator at `sizes`."""
    case = fenwick(op, sizes)
    q, _, v, _, level_weights = case.inputs[:5]
    shape = Shape if op == "ssd" else PairShape
    table: dict[str, Any] = shape.of(q, v, level_weights).table
    tangent = torch.randn_like(v)
    expected = _outputs(case, tangent)
    best_ms = time_ms(lambda: _outputs(case, tangent), sizes.device)
    console.print(f"{hardware(sizes.device)}, committed table: {best_ms:.3f} ms forward+backward")
    for kernel in table:
        for way in _alternatives(table[kernel]):
            kept, table[kernel] = table[kernel], way
            try:
                error = _difference(_outputs(case, tangent), expected)
                ms = time_ms(lambda: _outputs(case, tangent), sizes.device)
            except Exception as problem:  # too much shared memory, or the compiler gives up
                table[kernel] = kept
                console.print(f"{kernel}: {way}: {str(problem).splitlines()[0]}")
                continue
            right = error < TOLERANCE
            console.print(f"{kernel}: {way}: {ms:.3f} ms{'' if right else f', WRONG by {error}'}")
            if right and ms < best_ms * WORTHWHILE:
                best_ms = ms
            else:
                table[kernel] = kept
    console.print(f"best: {best_ms:.3f} ms")
    for kernel, way in table.items():
        console.print(f'    "{kernel}": {way},')
    return table


def _alternatives(way: Any) -> Iterator[Any]:
    stages_of = "stages" if way.loop_stages is None else "loop_stages"
    if isinstance(way, PairWay):
        width, widths = "columns", {64, 128, 256} if way.columns > 64 else {64}
    else:
        width, widths = "heads", {way.heads, max(1, way.heads // 2), way.heads * 2}
    for warps in (2, 4, 8):
        for stages in (1, 2, 3, 4):
            for wide in sorted(widths):
                other = replace(way, **{"warps": warps, stages_of: stages, width: wide})
                if other != way:
                    yield other


def _outputs(case: Case, tangent: Tensor) -> list[Tensor]:
    o = case.run()
    return [o.detach(), *torch.autograd.grad(o, list(case.inputs), tangent)]


def _difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    errors = [
        float((a.float() - e.float()).norm() / e.float().norm())
        for a, e in zip(actual, expected, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)
