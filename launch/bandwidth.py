"""`python -m launch.bandwidth BACKEND BYTES`: times an all-reduce, in a process on every node.

The first rank prints {"seconds": of one all-reduce, "bytes_per_second": what every node sends and
receives at that rate}: 2 (n - 1) / n of the bytes for n nodes, as nccl-tests counts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ROUNDS = 3
TIMEOUT = timedelta(seconds=30)


def main(backend: str, size: int) -> None:
    """Measures and ends the process."""
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
        numbers = torch.ones(size // 4, device=device)
        seconds = []
        for _ in range(1 + ROUNDS):
            began = time.perf_counter()
            dist.all_reduce(numbers)
            float(numbers[0])  # waits for the device
            seconds.append(time.perf_counter() - began)
    except RuntimeError as error:
        print(f"error: {(str(error).strip().splitlines() or ['no reason given'])[0]}", flush=True)
        os._exit(1)
    nodes, best = dist.get_world_size(), min(seconds[1:])
    if dist.get_rank() == 0:
        rate = size * 2 * (nodes - 1) / nodes / best
        print(json.dumps({"seconds": best, "bytes_per_second": rate}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads have aborted processes whose work was done


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
