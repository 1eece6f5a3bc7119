"""How a compiled kernel is started without Triton's bookkeeping, as far as a CPU can tell."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels import launching
from kernels.launching import launch_variant


class Variant:
    """A compiled kernel that notes how it is started."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.direct: list[tuple[Any, ...]] = []
        self.through_triton: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.direct.append(args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.through_triton.append((grid, *args))


class Kernel:
    """Compiles on the first call."""

    __name__ = "some_kernel"

    def __init__(self) -> None:
        self.variant, self.compiled = Variant(), 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def call(*args: Any, **options: Any) -> Variant:
            self.compiled += 1
            return self.variant

        return call


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(launching, "knobs", SimpleNamespace(runtime=runtime))
    active = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda device: 100 + device
    )
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return runtime


def start(kernel: Kernel, compiled: dict[Any, Any], x: torch.Tensor, **constants: int) -> None:
    launch_variant(compiled, {"num_warps": 4}, kernel, (2, 1, 1), (x, 7), constants)


def test_the_second_launch_goes_straight_to_the_compiled_kernel(hooks: SimpleNamespace) -> None:
    kernel, compiled, x = Kernel(), {}, torch.zeros(4)
    start(kernel, compiled, x, K=64)
    start(kernel, compiled, x, K=64)
    assert kernel.compiled == 1
    expected = (2, 1, 1, 103, "function", "metadata", None, None, None, x.data_ptr(), 7, 64)
    assert kernel.variant.direct == [expected]


def test_other_constants_are_another_variant(hooks: SimpleNamespace) -> None:
    kernel, compiled, x = Kernel(), {}, torch.zeros(4)
    start(kernel, compiled, x, K=64)
    start(kernel, compiled, x, K=128)
    assert kernel.compiled == 2
    assert kernel.variant.direct == []


@pytest.mark.parametrize("hook", [print, SimpleNamespace(calls=[print])])
def test_a_profiler_of_tritons_is_told(hooks: SimpleNamespace, hook: Any) -> None:
    kernel, compiled, x = Kernel(), {}, torch.zeros(4)
    start(kernel, compiled, x, K=64)
    hooks.launch_exit_hook = hook
    start(kernel, compiled, x, K=64)
    assert kernel.variant.direct == []
    assert kernel.variant.through_triton == [((2, 1, 1), x.data_ptr(), 7, 64)]


def test_an_empty_chain_of_hooks_is_no_profiler(hooks: SimpleNamespace) -> None:
    kernel, compiled, x = Kernel(), {}, torch.zeros(4)
    start(kernel, compiled, x, K=64)
    hooks.launch_enter_hook = SimpleNamespace(calls=[])
    start(kernel, compiled, x, K=64)
    assert len(kernel.variant.direct) == 1
