"""Tables of integers and angles that outlive a call: how they are made, and how they get to a
device without the host waiting for it."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_Table = TypeVar("_Table")


def to_last(make: Callable[[], _Table]) -> _Table:
    """make(), fit to be kept: tensors made in inference mode or as fake ones could not serve a
    training step. (torch.compile traces through caches, and keeps nothing.)"""
    if torch.compiler.is_compiling():
        return make()
    with torch.inference_mode(False), unset_fake_temporarily():
        return make()


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """`table` of the CPU on `device`.

    To copy from ordinary memory, the host waits until the device has done all it was given;
    from pinned memory the copy takes its place in the queue.
    """
    if device.type != "cuda" or table.device.type != "cpu":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
