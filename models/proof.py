"""Logits of a sample text, one block of the model in memory at a time: proof that files agree.

Two sets of weights are the same model where these logits agree. Only the weights outside the
blocks (embedding, norm, output projection) stay in memory; each block is loaded when its turn
comes and dropped after it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_prep.tokenizer import Tokenizer
from models.config import ModelConfig
from models.language_model import LanguageModel
from models.tensor_files import LazyTensors

SAMPLE_TEXT = (
    "A river that floods every spring leaves a little mud on each field it crosses.\n"
    "The farmers keep three books: one for the water, one for the seed, one for the debts.\n"
    "def total(rows):\n\treturn sum(row.amount for row in rows if row.year > 1987)\n"
    "\u00abCaf\u00e9\u00bb, na\u00efve, \u65e5\u672c\u8a9e, \U0001f600, \u2581: 3.14159 != 22/7\n"
)
SAMPLE_TOKENS = 192


class ProofError(RuntimeError):
    """What was written is not, or does not compute, what was to be written."""


def sample_tokens(config: ModelConfig, tokenizer_path: Path | None) -> Tensor:
    """[1, T] ids of the sample text, or numbers in their place where there is no tokenizer."""
    longest = min(SAMPLE_TOKENS, config.max_seq_len)
    if tokenizer_path is None:
        ids = [(7 * i * i + 3 * i + 1) % config.vocab_size for i in range(longest)]
    else:
        tokenizer = Tokenizer.load(tokenizer_path)
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"tokenizer does not fit: got {tokenizer.vocab_size} pieces; expected at most "
                f"vocab_size={config.vocab_size} of the model"
            )
        ids = [tokenizer.bos_id, *tokenizer.encode(SAMPLE_TEXT)][:longest]
    return torch.tensor([ids])


@torch.no_grad()
def streamed_logits(config: ModelConfig, tensors: LazyTensors, tokens: Tensor) -> Tensor:
    """Logits [B, T, vocab_size] fp32 of LanguageModel(config) with these weights, on the CPU.

    Args:
        tensors: exactly the model's parameters, of any float dtype; computed with in fp32.
        tokens: [B, T] int64.
    """
    with torch.device("meta"):
        model = LanguageModel(config).eval()
    outside = {name: t.load().float() for name, t in tensors.items() if not _in_block(name)}
    model.load_state_dict(outside, assign=True, strict=False)
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(_load(tensors, f"blocks.{index}."))
        block.register_forward_hook(_drop)
    return model(tokens)


def _in_block(name: str) -> bool:
    return name.startswith("blocks.")


def _load(tensors: LazyTensors, prefix: str) -> Any:
    def load(block: nn.Module, inputs: Any) -> None:
        state = {
            name.removeprefix(prefix): tensor.load().float()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        block.load_state_dict(state, assign=True)

    return load


def _drop(block: nn.Module, inputs: Any, output: Any) -> None:
    block.to("meta")
