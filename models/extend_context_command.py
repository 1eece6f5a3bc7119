"""`python -m models extend-context`."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from models.config import ModelConfig
from models.export import open_source
from models.extend_context import Rule, extend_parameters, extended_config
from models.language_model import LanguageModel
from models.output_folder import is_complete, new_folder
from models.weights import load_model, save_model

PROOF_TOKENS = 1024


def extend_context_command(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a step folder or a model directory.")],
    output: Annotated[Path, typer.Argument(help="New model directory.")],
    max_seq_len: Annotated[int, typer.Option(help="Longest row of the new model, in tokens.")],
    rule: Annotated[Rule, typer.Option(help="What the weights of new levels start from.")] = "copy",
) -> None:
    """Give a model more levels; rows of the old length keep every bit of their logits."""
    source = open_source(checkpoint)
    made_from = {"source": source.sha256, "max_seq_len": max_seq_len, "rule": rule}
    if is_complete(output, made_from):
        print(f"{output} is complete: nothing to do")
        return
    model = load_model(checkpoint)
    config = model.config
    extended = extended_config(config, max_seq_len, rule)
    parameters = extend_parameters(model.state_dict(), config, extended, rule)
    _prove_equal(model, parameters, extended)
    with new_folder(output, made_from) as folder:
        save_model(folder, parameters, extended, source.tokenizer)
        source.generation.save(folder)
    Console().print(
        f"{output}: max_seq_len {config.max_seq_len} -> {extended.max_seq_len}, levels "
        f"{config.num_levels} -> {extended.num_levels}, weights per head "
        f"{config.num_level_weights} -> {extended.num_level_weights}; the logits of a row of "
        f"{min(config.max_seq_len, PROOF_TOKENS)} tokens are equal bit for bit",
        highlight=False,
        soft_wrap=True,
    )


@torch.no_grad()
def _prove_equal(
    model: LanguageModel, parameters: dict[str, torch.Tensor], extended: ModelConfig
) -> None:
    with torch.device("meta"):
        longer = LanguageModel(extended)
    longer.load_state_dict(parameters, assign=True)
    random = torch.Generator().manual_seed(0)
    length = min(model.config.max_seq_len, PROOF_TOKENS)
    tokens = torch.randint(extended.vocab_size, (1, length), generator=random)
    if not torch.equal(model(tokens), longer.eval()(tokens)):
        raise SystemExit("error: the extended model's logits differ from the model's; not written")
