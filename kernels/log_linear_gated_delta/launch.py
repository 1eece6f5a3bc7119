"""How the gated delta rule's Triton kernels are launched: sizes from shapes, one table by GPU.

The table is committed so that a first call compiles one variant of each kernel and tunes nothing.
`python -m kernels tune --op gated_delta` measures the alternatives and prints a table to put here.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels.launching import launch_variant


@dataclass(frozen=True)
class PairWay:
    """How one kernel is launched: warps, pipeline stages of its loop, columns of a tile at most."""

    warps: int = 4
    stages: int = 1
    columns: int = 64
    loop_stages: int | None = None

    @property
    def compiler(self) -> dict[str, int]:
        """Options of Triton's compiler. num_stages is the pipelining of loops without their own."""
        return {"num_warps": self.warps, "num_stages": self.loop_stages or 3}


# Not measured yet: chosen by shared memory and registers of the compiled kernels.
HOPPER_PAIRS: dict[str, PairWay] = {
    "prepare": PairWay(),
    "chunk": PairWay(loop_stages=2),
    "leaf": PairWay(loop_stages=2),
    "merge": PairWay(stages=3, columns=128),
    "weights": PairWay(warps=2),
    "query": PairWay(loop_stages=1),
    "carry": PairWay(stages=2, columns=128),
    "out": PairWay(stages=3, columns=128),
    "walk": PairWay(stages=2),
    "sum": PairWay(stages=2, columns=128),
    "split": PairWay(),
    "left": PairWay(stages=3),
    "right": PairWay(stages=3),
    "state": PairWay(stages=2),
    "inside": PairWay(loop_stages=3),
    "values": PairWay(loop_stages=2),
    "keys": PairWay(loop_stages=3),
    "gates": PairWay(warps=2),
}
# Any other GPU, and fp32: little shared memory.
CAREFUL_PAIRS: dict[str, PairWay] = {
    _name: PairWay(warps=_way.warps, stages=1, loop_stages=1)
    for _name, _way in HOPPER_PAIRS.items()
}


@dataclass(frozen=True, eq=False)
class PairShape:
    """Sizes and dtypes of one call; K and V are multiples of 64. There is one object for each set
    of sizes, which keeps the kernels compiled for it."""

    G: int
    H: int
    K: int
    V: int
    L: int
    dtype: torch.dtype
    device: torch.device
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @staticmethod
    def of(q: Tensor, v: Tensor, level_weights: Tensor) -> "PairShape":
        """From q [B, T, G, K], v [B, T, H, V] and level_weights [B, T, H, L]."""
        G, K = q.shape[2:]
        H, V = v.shape[2:]
        L, weights_dtype = level_weights.shape[3], level_weights.dtype
        return _pair_shape(G, H, K, V, L, v.dtype, weights_dtype, v.device)

    def launch(self, kernel: Any, grid: tuple[int, int, int], *args: Any, **constants: Any) -> None:
        """kernel[grid](*args, **constants) with the table's options."""
        way = self.table[kernel.__name__.removeprefix("pair_").removesuffix("_kernel")]
        launch_variant(self.compiled, way.compiler, kernel, grid, args, constants)

    @property
    def NL(self) -> int:
        """Chunk levels that L allows, at least 1: rows of the read weights."""
        return max(1, self.L - 7)

    @property
    def node(self) -> torch.dtype:
        """Transitions, states, carried keys and queries in memory and in products. They are at
        most 1 (states by a scale of their own), so fp16 holds them, and has three bits more than
        bf16: with bf16 alone keys that repeat cost o 9e-3 (emulated; 2.6e-3 this way)."""
        return torch.float16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def gradient(self) -> torch.dtype:
        """Gradients of queries, which may be of any size; those of nodes are kept by tiles with
        scales, in the nodes' dtype."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def products(self) -> dict[str, Any]:
        """NODE, GRAD: operands of the large products, which are as in memory; IP their precision
        in fp32; FINE that of the [C, C] products, which are in fp32, and of the way down the
        tree."""
        bf16 = self.dtype == torch.bfloat16
        precise = "tf32" if self.dtype == torch.float16 else "tf32x3"
        return {
            "NODE": tl.float16 if bf16 else tl.float32,
            "GRAD": tl.bfloat16 if bf16 else tl.float32,
            "IP": precise,
            "FINE": "tf32" if bf16 else precise,
        }

    def columns(self, kernel: str) -> int:
        """Columns of a tile of [transition | state]: those of the table, if K and V allow them."""
        wanted = self.table[kernel].columns
        return wanted if self.K % wanted == self.V % wanted == 0 else 64

    @cached_property
    def table(self) -> dict[str, PairWay]:
        """The table for this GPU and these sizes."""
        if self.dtype != torch.bfloat16 or self.device.type != "cuda":
            return CAREFUL_PAIRS
        major, _ = torch.cuda.get_device_capability(self.device)
        return HOPPER_PAIRS if major >= 9 else CAREFUL_PAIRS


@lru_cache(maxsize=256)
def _pair_shape(
    G: int, H: int, K: int, V: int, L: int, dtype: torch.dtype, weights_dtype: torch.dtype,
    device: torch.device,
) -> PairShape:  # fmt: skip
    # weights_dtype makes objects differ whose compiled kernels do.
    return PairShape(G, H, K, V, L, dtype, device)
