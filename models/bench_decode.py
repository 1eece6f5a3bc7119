"""`python -m models bench-decode`: how fast a model reads and writes, and what it keeps in memory.

Weights are random and a state of n tokens is a state of zeros at position n: the time of a step
depends on neither, so contexts of a million tokens are measured without being read.
"""

import platform
import statistics
import time
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kernels.state import FenwickState
from models.accounting import state_bytes
from models.attention import AttentionState
from models.config import MAX_SEQ_LEN, PRESETS, ModelConfig
from models.decode_graph import GraphedStep
from models.decoding_state import held_bytes
from models.generate_command import check_device
from models.initialize import initialize
from models.language_model import LanguageModel, ModelState

WARM_UP = 3


@dataclass(frozen=True)
class DecodeTiming:
    """seconds_per_step: median, for all rows together."""

    seconds_per_step: float
    state_bytes_per_row: int


def state_at(model: LanguageModel, batch: int, position: int) -> ModelState:
    """The state of rows that have read `position` tokens, with zeros for what they left."""
    positions = torch.full((batch,), position, dtype=torch.int64)
    layers = []
    for block, layer in zip(model.blocks, model.empty_state(batch).layers, strict=True):
        if isinstance(layer, AttentionState):
            layer = layer.grown(min(position, block.mixer.window or position))
            layer = replace(layer, position=positions)
        elif isinstance(layer.memory, FenwickState):
            layer = replace(layer, memory=replace(layer.memory, position=positions))
        layers.append(layer)
    return ModelState(tuple(layers), positions)


@torch.no_grad()
def time_steps(
    model: LanguageModel, context: int, batch: int, steps: int, cuda_graph: bool
) -> DecodeTiming:
    """Times `steps` steps of `batch` rows after `context` tokens."""
    device = model.embedding.weight.device
    state = state_at(model, batch, context)
    held = held_bytes(state) // batch
    tokens = torch.zeros(batch, dtype=torch.int64, device=device)
    graph = GraphedStep(model, state, WARM_UP + steps) if cuda_graph else None
    seconds = []
    for _ in range(WARM_UP + steps):
        _wait(device)
        start = time.perf_counter()
        if graph is not None:
            graph(tokens)
        else:
            _, state = model.step(tokens, state)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return DecodeTiming(statistics.median(seconds[WARM_UP:]), held)


def time_prefill(model: LanguageModel, length: int) -> float:
    """Tokens per second of reading one row of `length` tokens in one call, the second of two."""
    device = model.embedding.weight.device
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    start = 0.0
    with torch.no_grad():
        for _ in range(2):
            _wait(device)
            start = time.perf_counter()
            model.prefill(tokens, model.empty_state(1), last_only=True)
            _wait(device)
    return length / (time.perf_counter() - start)


def bench_decode_command(
    presets: Annotated[list[str], typer.Argument(help="Names of presets.")],
    contexts: Annotated[str, typer.Option(help="Tokens read before, comma-separated.")] = (
        "1024,16384,131072,1048000"
    ),
    batches: Annotated[str, typer.Option(help="Rows that step together, comma-separated.")] = "1,8",
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 20,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of the timed prefill.")] = 2048,
    memory_gib: Annotated[float, typer.Option(help="States that need more are left out.")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    cuda_graph: Annotated[bool, typer.Option(help="On a CUDA device, replay a graph.")] = True,
) -> None:
    """Decoding speed and state size of presets at several lengths of context."""
    check_device(device)
    if unknown := [name for name in presets if name not in PRESETS]:
        raise ValueError(f"no such preset: got {unknown[0]}; expected one of {', '.join(PRESETS)}")
    lengths, rows = _numbers("--contexts", contexts), _numbers("--batches", batches)
    longest = max(*lengths, prefill) + WARM_UP + steps
    if longest > MAX_SEQ_LEN:
        raise ValueError(
            f"--contexts is too long: got {max(lengths)} tokens and {WARM_UP + steps} steps; "
            f"expected at most {MAX_SEQ_LEN} in all"
        )
    graph = cuda_graph and torch.device(device).type == "cuda"
    console = Console()
    for preset in presets:
        config = PRESETS[preset]
        config = config.model_copy(update={"max_seq_len": max(longest, config.max_seq_len)})
        model = _random_model(config, device)
        speed = time_prefill(model, prefill)
        table = Table(
            title=f"{preset}: prefill {speed:,.0f} tokens/s", box=box.SIMPLE, title_justify="left"
        )
        for heading in ("context", "batch", "tokens/s", "ms/step", "state/row"):
            table.add_column(heading, justify="right", no_wrap=True)
        for context in lengths:
            for batch in rows:
                needed = state_bytes(config, context) * batch
                if needed > memory_gib * 2**30:
                    left_out = f"needs {needed / 2**30:.1f} GiB"
                    table.add_row(f"{context:,}", str(batch), "-", "-", left_out)
                    continue
                timing = time_steps(model, context, batch, steps, graph)
                table.add_row(
                    f"{context:,}",
                    str(batch),
                    f"{batch / timing.seconds_per_step:,.0f}",
                    f"{1000 * timing.seconds_per_step:.2f}",
                    f"{timing.state_bytes_per_row / 2**20:.2f} MiB",
                )
        console.print(table)
    console.print(
        f"{_hardware(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}, fp32; "
        f"levels for {longest:,} tokens; ms/step: median of {steps}; prefill: one row of {prefill} "
        "tokens in one call",
        highlight=False,
        soft_wrap=True,
    )


def _random_model(config: ModelConfig, device: str) -> LanguageModel:
    model = LanguageModel(config)
    initialize(model, 0)
    return model.eval().to(device)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError(f"{option} must be whole numbers >= 1 between commas: got {text}")
    return numbers


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hardware(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}"
