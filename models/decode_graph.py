"""One decoding step as a CUDA graph: the kernels of a step, launched by one call.

A step of a small batch is hundreds of kernels of a few microseconds, so launching them costs more
than running them. A graph replays them on fixed memory: tokens go into one buffer, logits come out
of another, and the state is written back where it lay, or changed there by a kernel that moves
live levels only (log-linear Mamba-2). Positions live on the device inside the graph, so that the
same kernels carry whatever levels are full; the host counts along to refuse a row that is too long.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kernels.state import LazyFenwickState
from models.attention import AttentionState
from models.config import check_document_length
from models.decoding_state import map_tensors
from models.language_model import LanguageModel, ModelState

WARM_UP_STEPS = 3
"""Before the capture, so that libraries have allocated what they need."""


class FixedStep:
    """`model.step` for one batch, on tensors that never move: tokens in, logits out, the state
    changed where it lies. The state given is copied and stays as it is."""

    def __init__(self, model: LanguageModel, state: ModelState, max_tokens: int) -> None:
        """
        Args:
            state: of all rows; they may be at different positions.
            max_tokens: tokens of the longest row that KV caches have to hold; other mixers' states
                do not grow.
        """
        device = model.embedding.weight.device
        self._model, self._given, self._max_tokens = model, state, max_tokens
        self.tokens = torch.zeros(len(state.position), dtype=torch.int64, device=device)
        self.state = self._fixed_state()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Steps a few times, and puts the state back."""
        for _ in range(WARM_UP_STEPS):
            self.run()
        _write_back(self.state, self._fixed_state())

    @torch.no_grad()
    def run(self) -> Tensor:
        """Reads `tokens`, one of every row: logits [B, vocab_size]."""
        logits, after = self._model.step(self.tokens, self.state)
        _write_back(self.state, after)
        return logits

    def _fixed_state(self) -> ModelState:
        """A copy of the given state whose positions lie beside the other tensors, whose KV caches
        have room for max_tokens, and whose levels are lazy where a kernel steps them in place."""
        weight = self._model.embedding.weight
        layers = []
        for block, layer in zip(self._model.blocks, self._given.layers, strict=True):
            if isinstance(layer, AttentionState):
                slots = min(self._max_tokens, block.mixer.window or self._max_tokens)
                layer = layer.grown(max(layer.capacity, slots))
            elif block.mixer.steps_in_place(weight.device, weight.dtype):
                layer = replace(layer, memory=LazyFenwickState.of(layer.memory))
            layers.append(layer)
        return map_tensors(
            ModelState(tuple(layers), self._given.position),
            lambda tensor: tensor.to(weight.device, copy=True),
        )


class GraphedStep:
    """A FixedStep, replayed as a graph."""

    def __init__(self, model: LanguageModel, state: ModelState, max_steps: int) -> None:
        """Captures the graph.

        Args:
            state: of all rows; they may be at different positions.
            max_steps: steps that KV caches have to hold at most; those of other mixers do not grow.

        Raises:
            ValueError: the model is not on a CUDA device.
        """
        device = model.embedding.weight.device
        if device.type != "cuda":
            raise ValueError(
                f"a CUDA graph needs a CUDA device: the model is on {device.type}; "
                "step without a graph"
            )
        self._model, self._longest = model, int(state.position.max())
        self._end = self._longest + max_steps
        self._step = FixedStep(model, state, self._end)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._step.warm_up()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._step.run()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Reads one more token of every row, [B] int64 -> logits [B, vocab_size] fp32, valid until
        the next call.

        Raises:
            ValueError: more than max_seq_len tokens in all, or more than max_steps calls.
        """
        if self._longest == self._end:
            raise ValueError(f"the graph was captured for {self._end} tokens of the longest row")
        check_document_length(self._model.config, self._longest + 1)
        self._longest += 1
        self._step.tokens.copy_(tokens)
        self._graph.replay()
        return self._logits


def _write_back(target: Any, source: Any) -> None:
    """Copies every tensor of `source` into that of `target`."""
    if isinstance(source, Tensor):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    elif isinstance(source, tuple):
        for one, two in zip(target, source, strict=True):
            _write_back(one, two)
    else:
        for field in fields(source):
            _write_back(getattr(target, field.name), getattr(source, field.name))
