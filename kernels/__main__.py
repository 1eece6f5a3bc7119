"""python -m kernels bench | tune: how fast the operators are, beside installed peers."""

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kernels import bench as benchmark
from kernels.bench_cases import PEERS, Sizes

app = typer.Typer(
    help="Times the operators.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# The table needs its width in a log too.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

OPS = ("ssd", "gated_delta")
LENGTHS = "2048,4096,8192,16384,32768,65536,131072"
Op = Annotated[str, typer.Option(help=f"Operator: {' or '.join(OPS)}.")]
Heads = Annotated[int | None, typer.Option("--heads", help="H, value heads: 48; 12.")]
Groups = Annotated[int | None, typer.Option("--groups", help="G, key/query groups: 1; H.")]
KeySize = Annotated[int | None, typer.Option("--key-size", help="K: 128; 128.")]
ValueSize = Annotated[int | None, typer.Option("--value-size", help="V: 64; 128.")]


def _sizes(
    op: str, heads: int | None, groups: int | None, key_size: int | None, value_size: int | None
) -> tuple[int, int, int, int]:
    """G, H, K, V: what was asked for, else those of the operator's models (given above as ssd;
    gated_delta, whose heads have keys and queries of their own)."""
    _refuse(op not in OPS, f"unknown operator: got {op}; expected {' or '.join(OPS)}")
    asked = {"heads": heads, "groups": groups, "key-size": key_size, "value-size": value_size}
    _refuse_sizes({name: size for name, size in asked.items() if size is not None})
    H = heads or (48 if op == "ssd" else 12)
    G = groups or (1 if op == "ssd" else H)
    _refuse(H % G != 0, f"heads do not divide: got {H} in {G} groups")
    return G, H, key_size or 128, value_size or (64 if op == "ssd" else 128)


@app.command("bench")
def bench_command(
    op: Op = "ssd",
    against: Annotated[
        str, typer.Option(help=f"Peers, commas between them: {', '.join(PEERS)}.")
    ] = "",
    lengths: Annotated[str, typer.Option(help="T, commas between them.")] = LENGTHS,
    heads: Heads = None,
    groups: Groups = None,
    key_size: KeySize = None,
    value_size: ValueSize = None,
    batch_tokens: Annotated[int, typer.Option(help="B = batch tokens / T, at least 1.")] = 32768,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    output: Annotated[Path, typer.Option(help="Where JSON and PNG go.")] = Path("bench"),
) -> None:
    """Forward, forward+backward, memory, first call and matmul rate against T; JSON and PNG."""
    peers = [peer for peer in against.split(",") if peer]
    G, H, K, V = _sizes(op, heads, groups, key_size, value_size)
    _refuse_sizes({"batch-tokens": batch_tokens})
    unknown = [peer for peer in peers if peer not in PEERS]
    _refuse(bool(unknown), f"unknown peer: got {unknown}; expected some of {', '.join(PEERS)}")
    numbers = [part for part in lengths.split(",") if part]
    wrong = [part for part in numbers if not part.isdecimal() or int(part) < 1]
    _refuse(bool(wrong) or not numbers, f"no length: got {lengths!r}; expected 2048,4096,...")
    dtypes = ("bfloat16", "float16", "float32")
    _refuse(dtype not in dtypes, f"unknown dtype: got {dtype}; expected {', '.join(dtypes)}")
    _refuse(device not in ("cuda", "cpu"), f"unknown device: got {device}; expected cuda or cpu")
    _refuse(
        device == "cuda" and not torch.cuda.is_available(),
        "no CUDA device here; expected one, or --device cpu",
    )
    _refuse(
        output.exists() and not output.is_dir(),
        f"--output is a file: got {output}; expected a folder or a free name",
    )
    shape = {"G": G, "H": H, "K": K, "V": V, "dtype": dtype}
    shape |= {"device": device, "batch_tokens": batch_tokens}
    output.mkdir(parents=True, exist_ok=True)
    report = output / f"{op}.json"
    result = benchmark.bench(op, peers, [int(part) for part in numbers], shape, report)
    benchmark.plot(result, report.with_suffix(".png"))
    console.print(benchmark.table(result))
    rate = result["matmul_tflops"]
    console.print(f"matmul {rate:.3g} TFLOP/s; {report} and {report.with_suffix('.png')}")
    for peer, problem in result["failures"].items():
        console.print(f"{peer} did not finish: {problem}")
    if "fenwick" in result["failures"]:
        raise typer.Exit(1)


@app.command("bench-one", hidden=True)
def bench_one_command(op: str = "", peer: str = "", lengths: str = "", shape: str = "") -> None:
    """One operator of `bench`, in a process of its own."""
    benchmark.bench_one(op, peer, [int(T) for T in lengths.split(",")], json.loads(shape))


@app.command("bench-step")
def bench_step_command(
    op: Op = "ssd",
    batch: Annotated[int, typer.Option(help="B, rows.")] = 64,
    position: Annotated[int, typer.Option(help="Tokens that were read before.")] = 16383,
    heads: Heads = None,
    groups: Groups = None,
    key_size: KeySize = None,
    value_size: ValueSize = None,
) -> None:
    """One decoding step beside the time to move its live states once."""
    _refuse(not torch.cuda.is_available(), "no CUDA device here; the step kernel needs one")
    _refuse(position < 0, f"no position: got {position}; expected 0 or more")
    G, H, K, V = _sizes(op, heads, groups, key_size, value_size)
    _refuse_sizes({"batch": batch})
    from kernels.bench_step import bench_step

    device = torch.device("cuda")
    sizes = Sizes(batch, 1, G, H, K, V, torch.bfloat16, device)
    console.print(bench_step(op, sizes, position))


@app.command("tune")
def tune_command(
    op: Op = "ssd",
    length: Annotated[int, typer.Option(help="T.")] = 16384,
    heads: Heads = None,
    groups: Groups = None,
    key_size: KeySize = None,
    value_size: ValueSize = None,
    batch_tokens: Annotated[int, typer.Option(help="B = batch tokens / T.")] = 32768,
) -> None:
    """Measures other launch parameters on this GPU and prints the best table."""
    _refuse(not torch.cuda.is_available(), "no CUDA device here; tuning needs one")
    G, H, K, V = _sizes(op, heads, groups, key_size, value_size)
    _refuse_sizes({"length": length, "batch-tokens": batch_tokens})
    from kernels.tune import tune

    device = torch.device("cuda")
    B = max(1, batch_tokens // length)
    tune(op, Sizes(B, length, G, H, K, V, torch.bfloat16, device), console)


def _refuse_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        _refuse(size < 1, f"--{name} is too small: got {size}; expected at least 1")


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(2)


if __name__ == "__main__":
    app()
