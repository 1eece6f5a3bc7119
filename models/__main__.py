"""`python -m models`: continue a prompt; parameters, FLOPs and memory of a model."""

import difflib
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from models.accounting import (
    flops_per_token,
    forward_flops_per_token,
    parameter_count,
    state_bytes,
)
from models.bench_decode import bench_decode_command
from models.config import PRESETS, ModelConfig
from models.export_command import register as register_export
from models.extend_context_command import extend_context_command
from models.generate_command import generate_command
from models.lambda_command import lambda_command
from models.language_model import LanguageModel
from models.weights import load_config

INSPECTED_LENGTHS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)

app = typer.Typer(
    help="Architectures: generate text with a model, show what a model is made of.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
register_export(app)


app.command(name="generate")(generate_command)
app.command(name="extend-context")(extend_context_command)
app.command(name="lambda")(lambda_command)
app.command(name="bench-decode")(bench_decode_command)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A preset, run, step folder or model directory.")],
) -> None:
    """Parameters, FLOPs per token and memory per sequence."""
    config = _config(model)
    mixers = Counter(config.layer_mixers)
    console.print(
        f"[bold]{model}[/bold]: {_count(parameter_count(config))} parameters, "
        f"{config.num_layers} layers ({', '.join(f'{n} {mixer}' for mixer, n in mixers.items())}), "
        f"d_model {config.d_model}, max_seq_len {config.max_seq_len}, {config.num_levels} levels",
        highlight=False,
    )
    if settings := _settings(config):
        console.print(settings, highlight=False)
    console.print(_parameter_table(config))
    console.print(_length_table(config))


def _config(model: str) -> ModelConfig:
    if model in PRESETS:
        return PRESETS[model]
    if Path(model).exists():
        return load_config(model)
    close = difflib.get_close_matches(model, PRESETS, n=1, cutoff=0.0)[0]
    raise FileNotFoundError(
        f"no such model: got {model}; expected a folder or one of {', '.join(PRESETS)}; "
        f"the nearest preset is {close}"
    )


def _settings(config: ModelConfig) -> str:
    """The settings that change what the tables show, in words."""
    words = []
    if any(mixer.startswith("log_linear_") for mixer in config.layer_mixers):
        lambda_words = f"lambda {config.level_weights.kind}"
        if config.level_weights.tied_above is not None:
            lambda_words += f", levels above {config.level_weights.tied_above} share a weight"
        words.append(lambda_words)
    if "attention" in config.layer_mixers:
        sizes = config.attention
        words.append(
            f"attention {sizes.num_heads} heads, {sizes.kv_heads} key/value heads"
            + (f", window {sizes.window}" if sizes.window else "")
            + (", QK-norm" if sizes.qk_norm else "")
        )
    if config.logit_soft_cap is not None:
        words.append(f"logits capped at {config.logit_soft_cap:g}")
    if config.tie_embeddings:
        words.append("tied embeddings")
    return "; ".join(words)


def _parameter_table(config: ModelConfig) -> Table:
    with torch.device("meta"):
        model = LanguageModel(config)
    counts: Counter[str] = Counter()
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        layerless = ".".join("*" if part.isdigit() else part for part in name.split("."))
        counts[layerless] += parameter.numel()
        shapes[layerless] = list(parameter.shape)
    total = sum(counts.values())
    table = Table(title="Parameters (* = every layer that has it)", box=box.SIMPLE)
    table.add_column("name", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("numbers", justify="right")
    table.add_column("share", justify="right")
    for name, count in counts.items():
        table.add_row(name, str(shapes[name]), f"{count:,}", f"{count / total:.2%}")
    table.add_section()
    table.add_row("total", "", f"{total:,}", "100.00%")
    return table


def _length_table(config: ModelConfig) -> Table:
    """FLOPs and state by length, beside the KV cache of a softmax model as wide and as deep, with
    as many key/value heads per query head but no window."""
    attention = config.attention.model_copy(update={"window": None})
    softmax = config.model_copy(update={"mixer": "attention", "attention": attention})
    table = Table(title="Per token, per sequence", box=box.SIMPLE)
    for heading in ("tokens", "forward FLOPs", "and backward", "state", "softmax KV cache"):
        table.add_column(heading, justify="right", no_wrap=True)
    for length in INSPECTED_LENGTHS:
        table.add_row(
            f"{length:,}{'' if length <= config.max_seq_len else ' *'}",
            _count(forward_flops_per_token(config, length)),
            _count(flops_per_token(config, length)),
            _bytes(state_bytes(config, length, activation_bytes=2)),
            _bytes(state_bytes(softmax, length, activation_bytes=2)),
        )
    table.caption = (
        "FLOPs are means over a document of that length. "
        "Level states fp32, convolution tails and KV cache bf16.\n"
        f"* longer than max_seq_len {config.max_seq_len:,}: for a model with more levels"
    )
    return table


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def main() -> None:
    """Runs the command line; a user's mistake is one line and exit code 2."""
    try:
        app()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
