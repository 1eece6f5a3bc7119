"""The ranks of a run: who am I, on which device, and small agreements outside DeepSpeed.

Works in a process of its own, under torchrun or the deepspeed launcher, and in a Ray worker whose
process group is already initialised. Everything here is small and rare; gradients and parameters
travel through DeepSpeed.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its __all__

from pretrain.errors import Refused

COLLECTIVE_TIMEOUT_SECONDS = 1800
"""How long a rank waits for the others, e.g. while rank 0 hashes a large checkpoint."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the `size` ranks of the run."""

    rank: int
    size: int
    local_rank: int
    owns_group: bool
    """Whether the process group was initialised by start_world, and not by whoever started us."""

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        dist.all_reduce(torch.zeros(1, device=_collective_device(self.local_rank)))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64: exact for counts, and the same on every rank."""
        total = torch.tensor(
            values, dtype=torch.float64, device=_collective_device(self.local_rank)
        )
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def gather(self, value: T) -> list[T]:
        """The small values of all ranks, in the order of ranks."""
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank; a ValueError or OSError on any is Refused on all.

        So no rank goes on to wait for one that has stopped, and one clear line reaches the user.
        """
        result: T | None = None
        error: str | None = None
        try:
            result = work()
        except (ValueError, OSError) as caught:
            error = str(caught)
        for rank, message in enumerate(self.gather(error)):
            if message is not None:
                where = "" if rank == 0 else f" (on rank {rank})"
                raise Refused(message + where)
        return result  # type: ignore[return-value]  # work returned, so this is a T

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 and gives its result to every rank; raises like `agree`."""
        result = [self.agree(lambda: work() if self.rank == 0 else None)]
        dist.broadcast_object_list(result, src=0)
        return result[0]  # type: ignore[return-value]  # rank 0 put a T there


def start_world() -> World:
    """Joins the process group, or makes one: of this process alone if no launcher has set RANK.

    Raises:
        Refused: the launcher's environment is incomplete.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "RANK" not in os.environ and not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")  # DeepSpeed reads them
    if missing := [name for name in names if name not in os.environ]:
        raise Refused(
            f"environment variables of the launcher are missing: expected {', '.join(missing)} "
            f"beside the others; start with torchrun or python -m launch"
        )
    rank, size, local_rank = (int(os.environ[name]) for name in names)
    if dist.is_initialized():
        return World(rank, size, local_rank, owns_group=False)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    if size == 1:
        # A store inside the process: no port, so runs beside each other cannot collide.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return World(rank, size, local_rank, owns_group=True)


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    return "gloo" in str(error) or "Connection closed by peer" in str(error)


def stop_world(world: World) -> None:
    """Leaves the process group if start_world made it."""
    if world.owns_group and dist.is_initialized():
        dist.destroy_process_group()


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """The device of this rank.

    Raises:
        ValueError: a GPU is asked for where none is left for this rank.
    """
    gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise ValueError(
            "parallel.device has no GPU: got cuda; expected a CUDA device and none is visible; "
            "use parallel.device=cpu or a machine with a GPU"
        )
    if local_rank >= gpus:
        raise ValueError(
            f"more ranks than GPUs on this machine: got local rank {local_rank}; expected at most "
            f"{gpus} ranks for {gpus} visible GPUs; start fewer ranks or use parallel.device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _collective_device(local_rank: int) -> torch.device:
    """Where the process group can add numbers: the CPU, or the GPU if NCCL is all there is."""
    if "gloo" in str(dist.get_backend_config()) or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)
