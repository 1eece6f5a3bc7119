"""Tensors that the host makes for a device: how they get there without the host waiting for it."""

import torch
from torch import Tensor


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """`table` of the CPU on `device`.

    To copy from ordinary memory, the host waits until the device has done all it was given;
    from pinned memory the copy takes its place in the queue.
    """
    if device.type != "cuda" or table.device.type != "cpu":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
