"""`python -m launch.bandwidth BACKEND BYTES`: times an all-reduce between processes of a launch.

The first rank prints {"seconds": of one all-reduce, "bytes_per_second": what every rank sends and
receives at that rate}: 2 (n - 1) / n of the bytes for n ranks, as nccl-tests counts "busbw".
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
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    try:
        if backend == "nccl":
            torch.cuda.set_device(device)
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
    ranks, best = dist.get_world_size(), min(seconds[1:])
    if dist.get_rank() == 0:
        rate = size * 2 * (ranks - 1) / ranks / best
        print(json.dumps({"seconds": best, "bytes_per_second": rate}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads have aborted processes whose work was done


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
