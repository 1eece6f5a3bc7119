"""How the Triton kernels are launched: sizes that follow from shapes, and one table by GPU.

The table is committed so that a first call compiles one variant of each kernel and tunes nothing.
`python -m kernels tune --op ssd` measures the alternatives and prints a table to put here.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launching import launch_variant

PROGRAMS_WANTED = 264
"""Programs that fill the largest GPU twice; with fewer, a program takes fewer heads."""


@dataclass(frozen=True)
class Way:
    """How one kernel is launched: warps, pipeline stages of its loop, loads by TMA descriptors
    (Hopper and later), heads of a group that one program walks at most."""

    warps: int = 4
    stages: int = 1
    tma: bool = False
    heads: int = 1
    loop_stages: int | None = None

    @property
    def compiler(self) -> dict[str, int]:
        """Options of Triton's compiler. num_stages is the pipelining of loops without their own."""
        return {"num_warps": self.warps, "num_stages": self.loop_stages or 3}


# Measured on an H200 at B=2, T=16384, H=48, K=128, V=64 in bf16, with torch 2.11 and Triton 3.6.
HOPPER: dict[str, Way] = {
    "prepare": Way(),
    "leaf": Way(stages=3, tma=True),
    "up": Way(),
    "out": Way(stages=3, heads=12),
    "inside": Way(loop_stages=3, tma=True, heads=48),
    "across": Way(loop_stages=3, tma=True, heads=48),
    "query": Way(stages=4, tma=True, heads=48),
    "node": Way(stages=3, tma=True),
    "split": Way(),
    "down": Way(),
    "key_value": Way(loop_stages=2, tma=True, heads=48),
    "key_query": Way(),
    "gates": Way(warps=2),
}
# Any other GPU, fp32 and large states: little shared memory, no descriptors.
CAREFUL: dict[str, Way] = {
    name: Way(warps=way.warps, stages=1, loop_stages=1, heads=way.heads)
    for name, way in HOPPER.items()
}


@dataclass(frozen=True, eq=False)
class Shape:
    """Sizes and dtypes of one call. KP: K padded to a power of two; BV: columns of a tile of V,
    which is a multiple of them.

    There is one object for each set of sizes, which keeps the kernels compiled for it.
    """

    G: int
    H: int
    K: int
    KP: int
    V: int
    BV: int
    L: int
    dtype: torch.dtype
    device: torch.device
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @staticmethod
    def of(q: Tensor, v: Tensor, level_weights: Tensor) -> "Shape":
        """From q [B, T, G, K], v [B, T, H, V] and level_weights [B, T, H, L]."""
        G, K = q.shape[2:]
        H, V = v.shape[2:]
        L, weights_dtype = level_weights.shape[3], level_weights.dtype
        return _shape(G, H, K, V, L, v.dtype, weights_dtype, v.device)

    def launch(self, kernel: Any, grid: tuple[int, int, int], *args: Any, **constants: Any) -> None:
        """kernel[grid](*args, **constants) with the table's options."""
        way = self.table[kernel.__name__.removesuffix("_kernel")]
        launch_variant(self.compiled, way.compiler, kernel, grid, args, constants)

    @property
    def NL(self) -> int:
        """Rows of read_weights: level 7, then one for each chunk level that L allows."""
        return max(1, self.L - 7)

    @property
    def dot(self) -> tl.dtype:
        """Operands of the products. fp16 runs in fp32: a node's sum may exceed fp16's range."""
        return tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32

    @property
    def precision(self) -> str:
        """tf32 keeps every bit of an fp16 input. Three tf32 products keep those of fp32 (measured:
        4e-7), on tensor cores; plain fp32 products also compile three times as long."""
        return "tf32" if self.dtype == torch.float16 else "tf32x3"

    @property
    def compact_dtype(self) -> torch.dtype:
        """Weights inside a chunk, and gradients of nodes by scales: fp16 has three bits more than
        bf16, and they are small."""
        return torch.float16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def node_dtype(self) -> torch.dtype:
        """Nodes, and gradients of the states at the chunks' ends, in memory."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def value_tiles(self) -> int:
        """Tiles of V."""
        return self.V // self.BV

    @property
    def node_block(self) -> int:
        """Elements of a node that one program of an elementwise kernel takes."""
        size = self.KP * self.V
        return min(2048, size & -size)

    @property
    def node_tiles(self) -> int:
        """Programs for a node."""
        return self.KP * self.V // self.node_block

    @cached_property
    def table(self) -> dict[str, Way]:
        """The table for this GPU and these sizes."""
        small = self.KP <= 128 and self.value_tiles == 1  # as the table was measured
        if self.dtype != torch.bfloat16 or not small or self.device.type != "cuda":
            return CAREFUL
        major, _ = torch.cuda.get_device_capability(self.device)
        return HOPPER if major >= 9 else CAREFUL

    def heads_per_program(self, wanted: int, programs: int) -> int:
        """Heads of a group that one program walks: a divisor of H / G, at most `wanted`, and
        fewer where `programs` programs a group would not fill the GPU."""
        in_group = self.H // self.G
        divisors = [d for d in range(1, min(wanted, in_group) + 1) if in_group % d == 0]
        filling = [d for d in divisors if programs * self.H // d >= PROGRAMS_WANTED]
        return max(filling) if filling else min(d for d in divisors if d >= min(3, divisors[-1]))


@lru_cache(maxsize=256)
def _shape(
    G: int, H: int, K: int, V: int, L: int, dtype: torch.dtype, weights_dtype: torch.dtype,
    device: torch.device,
) -> Shape:  # fmt: skip
    # weights_dtype makes objects differ whose compiled kernels do.
    return Shape(G, H, K, 1 << (K - 1).bit_length(), V, 64, L, dtype, device)


def descriptor(x: Tensor, columns: int, rows: int, block_columns: int) -> TensorDescriptor:
    """A TMA descriptor of x seen as rows of `columns`: loads of [rows, block_columns], zero
    outside."""
    # Without its __init__, whose checks take longer than all else here; buffers are aligned.
    found = object.__new__(TensorDescriptor)
    found.base, found.shape = x, [x.numel() // columns, columns]
    found.strides, found.block_shape = [columns, 1], [rows, block_columns]
    found.padding = "zero"
    return found
