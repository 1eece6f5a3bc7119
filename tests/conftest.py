"""What all tests share. Without a GPU, GPU tests are skipped, with the reason, and Triton's kernels
run in its interpreter: that is decided when Triton is first imported, so it is decided here."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _ray_environment():
    """What a test sets for its own Ray is not that of the next test's."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    yield
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """No test's numbers depend on which tests ran before it; fixtures of every scope come later."""
    torch.manual_seed(0)
