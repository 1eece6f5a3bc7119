"""Times operators side by side: forward, forward+backward, memory, first call, matmul rate.

One process for each operator, so that a first call is a first call and one peer's failure or
memory does not touch another's. Results are one JSON object; table and plot are made from it.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table

from kernels.bench_cases import CAPTURABLE, PEERS, Sizes

REPEAT_SECONDS = 0.3
RESULT_LINE = "RESULT "


@dataclass(frozen=True)
class Measurement:
    """One operator at one size; times in ms, medians; peak memory in MB above the inputs, the
    gradient of o among them."""

    operator: str
    B: int
    T: int
    first_call_seconds: float
    forward_ms: float
    both_ms: float
    graph_ms: float | None
    peak_mb: float
    tflops: float | None
    """Of forward+backward by Sizes.flops or Sizes.gated_delta_flops; None for a peer, whose own
    count differs."""


def measure(op: str, peer: str, sizes: Sizes) -> Measurement:
    """Times one operator in this process."""
    began = time.perf_counter()
    case = PEERS[peer](op, sizes)
    device = sizes.device
    o = case.run()
    tangent = torch.randn_like(o)
    leaves = list(case.inputs)
    del o
    before = _allocated(device)

    def forward() -> None:
        with torch.no_grad():
            case.run()

    def both() -> None:
        torch.autograd.grad(case.run(), leaves, tangent)

    both()
    synchronize(device)
    first = time.perf_counter() - began
    _reset_peak(device)
    both()
    synchronize(device)
    peak = (_peak(device) - before) / 1e6
    forward_ms, both_ms = time_ms(forward, device), time_ms(both, device)
    captured = device.type == "cuda" and peer in CAPTURABLE
    replay_ms = graph_ms(both, device) if captured else None
    flops = sizes.flops if op == "ssd" else sizes.gated_delta_flops
    rate = sum(flops) / both_ms / 1e9 if peer == "fenwick" else None
    return Measurement(peer, sizes.B, sizes.T, first, forward_ms, both_ms, replay_ms, peak, rate)


def time_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Median milliseconds of `run`, by the device's own events where it has them."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=50, rep=int(1000 * REPEAT_SECONDS), return_mode="median"))
    run()
    times: list[float] = []
    while sum(times) < REPEAT_SECONDS or len(times) < 3:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1000 * median(times)


def matmul_tflops(device: torch.device) -> float:
    """Rate of a large square bf16 product: what the percentages refer to."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / time_ms(lambda: a @ b, device) / 1e9


def bench(
    op: str, peers: Sequence[str], lengths: Sequence[int], shape: dict[str, Any], report: Path
) -> dict[str, Any]:
    """Every operator at every length, each in a process of its own; written to `report` as JSON
    after each, so that an interrupted bench has what it measured.

    Args:
        shape: G, H, K, V, dtype, device and batch_tokens: B = max(1, batch_tokens / T).
    """
    result: dict[str, Any] = {
        "format_version": 1,
        "op": op,
        "shape": shape,
        "hardware": hardware(torch.device(shape["device"])),
        "versions": versions(),
        "commit": commit(),
        "matmul_tflops": matmul_tflops(torch.device(shape["device"])),
        "measurements": [],
        "failures": {},
    }
    for peer in ["fenwick", *peers]:
        command = [sys.executable, "-m", "kernels", "bench-one", "--op", op, "--peer", peer]
        command += ["--lengths", ",".join(map(str, lengths)), "--shape", json.dumps(shape)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith(RESULT_LINE):
                result["measurements"].append(json.loads(line.removeprefix(RESULT_LINE)))
                report.write_text(json.dumps(result, indent=1))
                print(f"{peer}: T={result['measurements'][-1]['T']} done", flush=True)
        errors = process.stderr.read().strip().splitlines()
        if process.wait():
            result["failures"][peer] = errors[-1] if errors else f"exit code {process.returncode}"
            print(f"{peer}: {result['failures'][peer]}", flush=True)
        report.write_text(json.dumps(result, indent=1))
    return result


def bench_one(op: str, peer: str, lengths: Sequence[int], shape: dict[str, Any]) -> None:
    """Prints one RESULT line for each length."""
    device, dtype = torch.device(shape["device"]), getattr(torch, shape["dtype"])
    for T in lengths:
        B = max(1, shape["batch_tokens"] // T)
        sizes = Sizes(B, T, shape["G"], shape["H"], shape["K"], shape["V"], dtype, device)
        found = asdict(measure(op, peer, sizes))
        print(RESULT_LINE + json.dumps(found), flush=True)


def table(result: dict[str, Any]) -> Table:
    """One row for each operator and length."""
    shown = Table(box=box.SIMPLE, title=f"{result['op']} on {result['hardware']}")
    for column in ("operator", "B", "T", "forward ms", "fwd+bwd ms", "graph ms", "peak MB",
                   "first call s", "TFLOP/s", "of matmul"):  # fmt: skip
        shown.add_column(column, justify="left" if column == "operator" else "right")
    for m in result["measurements"]:
        rate = m["tflops"]
        shown.add_row(
            m["operator"], str(m["B"]), str(m["T"]), f"{m['forward_ms']:.3f}",
            f"{m['both_ms']:.3f}", "-" if m["graph_ms"] is None else f"{m['graph_ms']:.3f}",
            f"{m['peak_mb']:.0f}", f"{m['first_call_seconds']:.1f}",
            "-" if rate is None else f"{rate:.3g}",
            "-" if rate is None else f"{rate / result['matmul_tflops']:.1%}",
        )  # fmt: skip
    return shown


def plot(result: dict[str, Any], path: Path) -> None:
    """Forward+backward time per token against T, one line for each operator."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for operator in dict.fromkeys(m["operator"] for m in result["measurements"]):
        points = [m for m in result["measurements"] if m["operator"] == operator]
        tokens = [m["B"] * m["T"] for m in points]
        per_token = [1e6 * m["both_ms"] / n for m, n in zip(points, tokens, strict=True)]
        axes.plot([m["T"] for m in points], per_token, marker="o", label=operator)
    axes.set(xscale="log", yscale="log", xlabel="T", ylabel="forward+backward, ns a token")
    axes.set_title(f"{result['op']}, {result['shape']['H']} heads, {result['hardware']}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def hardware(device: torch.device) -> str:
    """What the numbers were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads of {platform.machine()}"


def versions() -> dict[str, str]:
    """Versions that decide the numbers."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "flash-linear-attention", "mamba-ssm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the code, with + where files differ from it; "unknown" outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True, stderr=-3)
        changed = subprocess.check_output([*git, "status", "--porcelain"], text=True, stderr=-3)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changed.strip() else "")


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_ms(run: Callable[[], None], device: torch.device) -> float | None:
    """Median milliseconds of `run` as one CUDA graph; None where it cannot be captured."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        return None
    return time_ms(graph.replay, device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
