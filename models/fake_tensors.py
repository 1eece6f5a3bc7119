"""Running a model for its shapes alone: as on a GPU, without one and without memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.dispatch import as_on_gpu


@contextmanager
def fake_tensors(gpu: bool) -> Iterator[None]:
    """Inside, tensors have shapes and no numbers.

    Args:
        gpu: operators are a GPU's, where Triton is installed to tell of them, and not the CPU's.
    """
    operators = as_on_gpu() if gpu and find_spec("triton") is not None else nullcontext()
    # Plans of chunks are real tensors.
    with FakeTensorMode(allow_non_fake_inputs=True), operators:
        yield
