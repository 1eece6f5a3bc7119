"""`python -m models lambda`.

matplotlib and TensorBoard are imported where they are used: they take seconds, which every other
command of this program would wait for.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from data_prep.tokenizer import Tokenizer
from models.checkpoint_directory import MANIFEST_NAME, read_manifest, resolve, write_atomically
from models.lambda_reading import LayerLambda, read_lambda
from models.weights import load_model


def lambda_command(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a step folder or a model directory.")],
    text: Annotated[Path, typer.Option(help="File whose beginning the model reads.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the PNGs and lambda.json.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to read.")] = 512,
) -> None:
    """Show what weight each token gives each level; a run also gets it in its TensorBoard."""
    directory = resolve(checkpoint)
    tokenizer = Tokenizer.load(directory / "tokenizer.model")
    model = load_model(directory)
    tokens = _tokens(text, tokenizer, min(max_tokens, model.config.max_seq_len))
    all_lambdas = read_lambda(model, tokens)
    summary = {
        "model": str(directory),
        "text": str(text),
        "tokens": len(tokens),
        "layers": [_layer_summary(lambdas) for lambdas in all_lambdas],
    }
    console = Console()
    console.print(_table(all_lambdas))
    if output is not None:
        from models.lambda_maps import draw_maps, draw_means, save_figure

        output.mkdir(parents=True, exist_ok=True)
        for lambdas in all_lambdas:
            save_figure(draw_maps(lambdas), output / f"lambda-layer-{lambdas.layer:02d}.png")
        save_figure(draw_means(all_lambdas), output / "lambda-means.png")
        write_atomically(output / "lambda.json", json.dumps(summary, indent=1).encode())
        console.print(
            f"{output}: lambda.json, lambda-means.png, lambda-layer-*.png",
            highlight=False,
            soft_wrap=True,
        )
    if (run := _run_of(directory)) is not None:
        _write_tensorboard(run, directory, all_lambdas)
        console.print(f"{run / 'tensorboard' / 'lambda'}: images and scalars", soft_wrap=True)


def _tokens(text: Path, tokenizer: Tokenizer, most: int) -> torch.Tensor:
    if not text.is_file():
        raise FileNotFoundError(f"no text file: {text} does not exist")
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text file {text} is not UTF-8: {error.reason}") from None
    tokens = [tokenizer.bos_id, *tokenizer.encode(content)][:most]
    if len(tokens) < 2:
        raise ValueError(f"text file {text} is empty; expected at least one token")
    return torch.tensor(tokens)


def _layer_summary(lambdas: LayerLambda) -> dict[str, Any]:
    return {
        "layer": lambdas.layer,
        "mean": lambdas.mean.tolist(),  # [head][level]
        "std_over_tokens": lambdas.deviation.tolist(),
    }


def _table(all_lambdas: list[LayerLambda]) -> Table:
    """Mean over the heads, and the mean of their deviations."""
    table = Table(
        title="Lambda: mean +- std over tokens, mean over heads",
        box=box.SIMPLE,
        title_justify="left",
    )
    table.add_column("level", justify="right")
    table.add_column("block", justify="right")
    for lambdas in all_lambdas:
        table.add_column(f"layer {lambdas.layer}", justify="right", no_wrap=True)
    means = [lambdas.mean.mean(0) for lambdas in all_lambdas]
    deviations = [lambdas.deviation.mean(0) for lambdas in all_lambdas]
    for level in range(len(means[0])):
        cells = [
            f"{m[level]:.3f} +- {d[level]:.3f}" for m, d in zip(means, deviations, strict=True)
        ]
        table.add_row(str(level), f"{1 << max(level - 1, 0):,}", *cells)
    table.caption = "block: tokens that the level holds"
    return table


def _run_of(directory: Path) -> Path | None:
    """The run that a step folder belongs to: RUN/checkpoints/step-*."""
    inside = (directory / MANIFEST_NAME).is_file() and directory.parent.name == "checkpoints"
    return directory.parent.parent if inside else None


def _write_tensorboard(run: Path, directory: Path, all_lambdas: list[LayerLambda]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    from models.lambda_maps import draw_maps, draw_means

    step = int(read_manifest(directory).get("step", 0))
    with SummaryWriter(log_dir=str(run / "tensorboard" / "lambda")) as writer:
        for lambdas in all_lambdas:
            tag = f"lambda/layer_{lambdas.layer:02d}"
            writer.add_figure(f"{tag}/maps", draw_maps(lambdas), step)
            for level, value in enumerate(lambdas.mean.mean(0).tolist()):
                writer.add_scalar(f"{tag}/mean/level_{level:02d}", value, step)
            for level, value in enumerate(lambdas.deviation.mean(0).tolist()):
                writer.add_scalar(f"{tag}/std_over_tokens/level_{level:02d}", value, step)
        writer.add_figure("lambda/means", draw_means(all_lambdas), step)
