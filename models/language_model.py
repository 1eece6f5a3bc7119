"""The language model: embedding, pre-norm blocks of (mixer, SwiGLU), norm, output projection.

    x = embedding(tokens)
    x = x + mixer(RMSNorm(x));   x = x + mlp(RMSNorm(x))         for every layer
    logits = lm_head(RMSNorm(x))

Single device, no ranks, no engine. Parameters are fp32 and left uninitialised (models/initialize.py
or models/weights.py fills them); the residual stream stays fp32 under an autocast from outside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Attention
from models.config import ModelConfig, check_document_length
from models.gated_deltanet import GatedDeltaNet
from models.layers import Embedding, Linear, RMSNorm, SwiGLU, at_least_fp32
from models.mamba2 import Mamba2

MIXERS: dict[str, Callable[[ModelConfig], Any]] = {
    "log_linear_mamba2": lambda config: Mamba2(config, log_linear=True),
    "log_linear_gated_deltanet": lambda config: GatedDeltaNet(config, log_linear=True),
    "mamba2": lambda config: Mamba2(config, log_linear=False),
    "gated_deltanet": lambda config: GatedDeltaNet(config, log_linear=False),
    "attention": Attention,
}


@dataclass(frozen=True)
class ModelState:
    """What a model remembers of the tokens read so far.

    layers: the state of each layer's mixer.
    position: [B] int64 on the CPU, tokens read so far by each row; rows may differ. On a device in
        a captured step only (models/decode_graph.py).
    """

    layers: tuple[Any, ...]
    position: Tensor


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, mixer: str) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer: Any = MIXERS[mixer](config)
        self.mlp_norm: RMSNorm | None = None
        self.mlp: SwiGLU | None = None
        if config.mlp.hidden_size:
            self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
            self.mlp = SwiGLU(config.d_model, config.mlp.hidden_size)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None, longest: int) -> Tensor:
        return self._mlp(x, self.mixer(self.mixer_norm(x), cu_seqlens, longest))

    def prefill(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer.prefill(self.mixer_norm(x), state)
        return self._mlp(x, y), state

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer.step(self.mixer_norm(x), state)
        return self._mlp(x, y), state

    def _mlp(self, x: Tensor, y: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x + y
        x, normed = self.mlp_norm(x, y)
        return x + self.mlp(normed)


class LanguageModel(nn.Module):
    """Next-token logits; every document, a row or a part of one, starts from an empty memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        blocks = nn.ModuleList(Block(config, mixer) for mixer in config.layer_mixers)
        self.blocks: Sequence[Block] = cast("Sequence[Block]", blocks)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        head: Callable[[Tensor, Tensor, float | None], Any] | None = None,
    ) -> Any:
        """Logits of whole documents, or what `head` makes of the states before them.

        Args:
            tokens: [B, T] int64, T >= 1.
            cu_seqlens: [N+1] int64 on the CPU, where the N documents start in the flattened B*T
                tokens, and B*T; every row start is among them. None: each row is one document.
            head: called with the normed states x [B, T, D], the output matrix W [vocab_size, D] and
                the soft cap c or None; logits are x W^T, or c tanh(x W^T / c). So a loss need not
                hold all logits, and W is used where an engine that gathers parameters expects it.

        Returns:
            [B, T, vocab_size] fp32; [b, t] predicts the token after tokens[b, t]. With a head, its
            result.

        Raises:
            ValueError: cu_seqlens does not cut the rows into documents, or one is longer than
                max_seq_len.
        """
        B, T = tokens.shape
        longest = T
        if cu_seqlens is not None:
            longest = _longest_document(cu_seqlens, B, T)
            tokens = tokens.reshape(1, B * T)
        check_document_length(self.config, longest)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens, longest)
        if head is None:
            return self._logits(x).reshape(B, T, -1)
        output = self.embedding if self.lm_head is None else self.lm_head
        return head(self.norm(x).reshape(B, T, -1), output.weight, self.config.logit_soft_cap)

    def empty_state(self, batch_size: int) -> ModelState:
        """The state before any token, for `batch_size` rows."""
        layers = tuple(block.mixer.empty_state(batch_size) for block in self.blocks)
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.int64))

    def prefill(
        self, tokens: Tensor, state: ModelState, *, last_only: bool = False
    ) -> tuple[Tensor, ModelState]:
        """Reads T more tokens of every row at once; a long prompt may be read in several calls.

        Args:
            tokens: [B, T] int64, T >= 0; rows are of equal length, without padding. What they read
                before may differ in length (models/decoding_state.py joins such rows).
            state: from `empty_state` or an earlier call. It is used up.
            last_only: logits of the last token only, [B, min(T, 1), vocab_size].

        Returns:
            (logits [B, T, vocab_size] fp32, state)

        Raises:
            ValueError: more than max_seq_len tokens in all.
        """
        B, T = tokens.shape
        if T == 0:
            return self.embedding.weight.new_zeros(B, 0, self.config.vocab_size), state
        check_document_length(self.config, int(state.position.max()) + T)
        x = self.embedding(tokens)
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.prefill(x, layer)
            layers.append(layer)
        logits = self._logits(x[:, -1:] if last_only else x)
        return logits, ModelState(tuple(layers), state.position + T)

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Reads one more token of every row.

        Args:
            tokens: [B] int64.
            state: from `empty_state`, `prefill` or an earlier step. It is used up.

        Returns:
            (logits [B, vocab_size] fp32, state)

        Raises:
            ValueError: more than max_seq_len tokens in all.
        """
        if state.position.device.type == "cpu":
            check_document_length(self.config, int(state.position.max()) + 1)
        x = self.embedding(tokens)
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.step(x, layer)
            layers.append(layer)
        return self._logits(x), ModelState(tuple(layers), state.position + 1)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        lm_head = self.lm_head
        logits = F.linear(x, self.embedding.weight) if lm_head is None else lm_head(x)
        logits = at_least_fp32(logits)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _longest_document(cu_seqlens: Tensor, B: int, T: int) -> int:
    starts = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    if not lengths or starts[0] != 0 or starts[-1] != B * T or min(lengths) < 1:
        raise ValueError(
            f"cu_seqlens must rise from 0 to B * T = {B * T} without empty documents: got "
            f"{_shortened(starts)}"
        )
    if missing := set(range(0, B * T, T)).difference(starts):
        raise ValueError(
            f"cu_seqlens must hold every row start (multiples of T={T}): {min(missing)} is missing"
        )
    return max(lengths)


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{str(numbers[:4])[1:-1]}, ..., {numbers[-1]}]"
