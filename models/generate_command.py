"""`python -m models generate`."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from data_prep.tokenizer import Tokenizer
from models.checkpoint_directory import resolve
from models.generation_settings import read_generation_settings
from models.text_generation import generate_text, stream_text
from models.weights import load_model


def generate_command(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a step folder or a model directory.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeatable.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="File whose text is continued; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 100,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: the likeliest token. Default: as generation_config.json says, or 0."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among this much probability.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text before which a continuation ends; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print as it is made; needs one prompt.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    cuda_graph: Annotated[
        bool, typer.Option(help="On a CUDA device, replay each step as one graph.")
    ] = True,
) -> None:
    """Continue prompts; those of a file are not printed again."""
    shown, prompts = _prompts(prompt or [], prompt_file or [])
    if stream and len(prompts) != 1:
        raise ValueError(f"--stream needs one prompt: got {len(prompts)}; leave --stream out")
    directory = resolve(checkpoint)
    check_device(device)
    tokenizer = Tokenizer.load(directory / "tokenizer.model")
    model = load_model(directory, device)
    if temperature is None:
        saved = read_generation_settings(directory)
        temperature = 1.0 if saved is not None and saved.do_sample else 0.0
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop or [],
        "seed": seed,
        "cuda_graph": cuda_graph and torch.device(device).type == "cuda",
    }
    if stream:
        for index, (_, text) in enumerate(stream_text(model, tokenizer, prompts, **settings)):
            print(text if index else shown[0] + text, end="", flush=True)
        print()
        return
    continued = generate_text(model, tokenizer, prompts, **settings)
    for index, (text, more) in enumerate(zip(shown, continued, strict=True)):
        if index:
            print("-" * 40)
        print(text + more)


def _prompts(texts: list[str], files: list[Path]) -> tuple[list[str], list[str]]:
    """(what to print before each continuation, the prompts)"""
    if not texts and not files:
        raise ValueError("nothing to continue: give --prompt TEXT or --prompt-file FILE")
    contents = []
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"no prompt file: {file} does not exist")
        try:
            contents.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt file {file} is not UTF-8: {error.reason}") from None
    return texts + [""] * len(files), texts + contents


def check_device(device: str) -> None:
    """ValueError unless the device exists here."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device: got {device}; expected cpu, cuda or cuda:N")
    if wanted.type == "cuda" and (wanted.index or 0) >= (found := torch.cuda.device_count()):
        raise ValueError(
            f"no such device: got {device}, with {found} CUDA devices here; use --device cpu"
        )
