"""LanguageModel as a transformers model: same parameters, same logits, `generate()` on our state.

What generation keeps is the model's own state: one matrix per live level and head, O(log T), or
keys and values for attention layers. Padding never enters it: rows of a batch are read in groups
of equal length, without their padding, and stay in those groups.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from models.config import ModelConfig
from models.huggingface.configuration import FenwickConfig
from models.initialize import initialize
from models.language_model import LanguageModel, ModelState
from models.parameter_groups import decays

PREFILL_TOKENS = 2048
"""Tokens of each row read at once: bounds the memory of a long prompt."""

# Given by callers of every model; without a meaning for this one, whose state knows its position.
_WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "num_items_in_batch"})


@dataclass
class RowGroup:
    """Rows of a batch that have read equally many tokens, and what the model remembers of them."""

    rows: list[int]
    state: ModelState


@dataclass
class FenwickCache:
    """What `generate` carries from step to step; `length` counts columns read, padding included."""

    groups: list[RowGroup]
    length: int

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was (beam search)."""
        chosen = beam_idx.tolist()
        groups = []
        for group in self.groups:
            place = {row: i for i, row in enumerate(group.rows)}
            rows = [row for row, old in enumerate(chosen) if old in place]
            if rows:
                index = torch.tensor([place[chosen[row]] for row in rows])
                groups.append(RowGroup(rows, _map_tensors(group.state, _picker(index))))
        self.groups = groups

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = sum(len(group.rows) for group in self.groups)
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))


class FenwickForCausalLM(PreTrainedModel, GenerationMixin):
    """`model` is the language model itself; parameters are named model.<name in Fenwick>."""

    config_class = FenwickConfig
    base_model_prefix = "model"
    # A read cannot be taken back, so transformers must not offer what rewinds the cache.
    _is_stateful = True

    def __init__(self, config: FenwickConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(ModelConfig.model_validate(config.fenwick.get("model")))
        kept = {n: p for n, p in self.model.named_parameters() if not decays(n)}
        for parameter in kept.values():  # made in the dtype of the matrices where that is set
            parameter.data = parameter.data.float()
        self._keep_in_fp32_modules_strict = sorted({_last_part(name) for name in kept})
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Starting values of a model made from a config; nothing that was loaded is touched.

        transformers asks for one module after the other, and not at all for modules that hold
        others only; the embedding is in every model, so its turn is everybody's.
        """
        if module is self.model.embedding and not any(
            getattr(parameter, "_is_hf_initialized", False) for parameter in self.parameters()
        ):
            initialize(self.model, torch.initial_seed())

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of every token, and the loss of `labels` (-100: not predicted).

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T], or with a cache [B, columns read so far + T]; 0 marks padding,
                which the model never reads and whose logits are 0. With a cache, padding is on
                the left only.
            past_key_values: the cache of an earlier call; it is used up.
            use_cache: return a cache. Default: only where one was given.
            logits_to_keep: only of this many last tokens; 0: of all.

        Raises:
            ValueError: padding elsewhere, a row without tokens, more tokens than the model has
                levels for, or an argument that this model does not know.
        """
        _refuse_unknown(kwargs)
        cache = past_key_values if isinstance(past_key_values, FenwickCache) else None
        keep = _real_tokens(attention_mask, input_ids, cache)
        with self._precision():
            if cache is None and not use_cache:
                logits = self._whole_rows(input_ids, keep)[:, -logits_to_keep:]
            elif cache is None:
                logits, cache = self._read_prompt(input_ids, keep, logits_to_keep)
            else:
                if not bool(keep.all()):
                    raise ValueError("padding after the prompt: expected a mask of ones there")
                logits = self._read_on(input_ids, cache, logits_to_keep)
        loss = None
        if labels is not None:
            shown = logits[:, :-1].float().flatten(0, 1)
            loss = F.cross_entropy(shown, labels[:, 1:].to(shown.device).flatten())
        if return_dict is False:
            return tuple(value for value in (loss, logits, cache) if value is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        logits_to_keep: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The columns that the cache has not read yet."""
        cache = past_key_values if isinstance(past_key_values, FenwickCache) else None
        return {
            "input_ids": input_ids if cache is None else input_ids[:, cache.length :],
            "past_key_values": cache,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep or 0,
        }

    def _precision(self) -> Any:
        """bf16 and fp16 weights compute under autocast, as in training; gates stay fp32."""
        if self.dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device.type, dtype=self.dtype)
        return contextlib.nullcontext()

    def _whole_rows(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Without a cache: the real tokens of all rows packed, each row a document."""
        if bool(keep.all()):
            return self.model(tokens)
        lengths = keep.sum(1)
        ends = lengths[lengths > 0].cumsum(0).cpu()
        cu_seqlens = torch.cat([ends.new_zeros(1), ends])
        packed = self.model(tokens[keep][None], cu_seqlens)[0]
        logits = packed.new_zeros(*tokens.shape, packed.shape[-1])
        return logits.index_put((keep,), packed)

    def _read_prompt(
        self, tokens: Tensor, keep: Tensor, logits_to_keep: int
    ) -> tuple[Tensor, FenwickCache]:
        T = tokens.shape[1]
        lengths = keep.sum(1).tolist()
        on_the_left = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
        if not bool((keep.cpu() == on_the_left).all()):
            raise ValueError(
                "prompts of unequal length must be padded on the left: got padding elsewhere; "
                "set tokenizer.padding_side = 'left'"
            )
        if 0 in lengths:
            raise ValueError(
                f"prompt {lengths.index(0)} is empty; expected at least one token, such as bos"
            )
        columns = min(logits_to_keep or T, T)
        logits = torch.zeros(0)
        groups = []
        for length in sorted(set(lengths)):
            rows = [row for row, other in enumerate(lengths) if other == length]
            read, state = self._read_rows(
                tokens[rows, T - length :], self.model.empty_state(len(rows)), columns
            )
            groups.append(RowGroup(rows, state))
            if not logits.numel():
                logits = read.new_zeros(tokens.shape[0], columns, read.shape[-1])
            logits[rows, columns - read.shape[1] :] = read
        return logits, FenwickCache(groups, T)

    def _read_on(self, tokens: Tensor, cache: FenwickCache, logits_to_keep: int) -> Tensor:
        T = tokens.shape[1]
        columns = min(logits_to_keep or T, T)
        logits: Tensor | None = None
        for group in cache.groups:
            read, group.state = self._read_rows(tokens[group.rows], group.state, columns)
            if logits is None:
                logits = read.new_zeros(tokens.shape[0], columns, read.shape[-1])
            logits[group.rows] = read
        assert logits is not None  # a cache has at least one group
        cache.length += T
        return logits

    def _read_rows(
        self, tokens: Tensor, state: ModelState, columns: int
    ) -> tuple[Tensor, ModelState]:
        """Logits of the last `columns` of [b, T] tokens, or of all where there are fewer."""
        if tokens.shape[1] == 1:
            logits, state = self.model.step(tokens[:, 0], state)
            return logits[:, None], state
        pieces = []
        for piece in tokens.split(PREFILL_TOKENS, dim=1):
            logits, state = self.model.prefill(piece, state, last_only=columns == 1)
            pieces.append(logits)
        if columns == 1:
            return pieces[-1], state
        return torch.cat(pieces, dim=1)[:, -columns:], state


def _real_tokens(mask: Tensor | None, tokens: Tensor, cache: FenwickCache | None) -> Tensor:
    """[B, T] bool: which of these tokens are not padding."""
    B, T = tokens.shape
    if mask is None:
        return torch.ones(B, T, dtype=torch.bool, device=tokens.device)
    columns = T + (cache.length if cache is not None else 0)
    if tuple(mask.shape) not in ((B, columns), (B, T)):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; expected {[B, columns]}, 1 for tokens "
            "and 0 for padding"
        )
    return mask[:, -T:].bool()


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise ValueError(f"{name} is not supported by this model: got {type(value).__name__}")


def _last_part(name: str) -> str:
    """The part of a parameter's name by which transformers keeps it in fp32."""
    parts = name.split(".")
    if parts[-1] in ("weight", "bias") or parts[-2] == "level_weights":
        return parts[-2]
    return parts[-1]


def _picker(index: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_select(0, index.to(x.device))


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A state with every tensor in it replaced; their first dimension is the rows."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_map_tensors(item, function) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _map_tensors(getattr(value, f.name), function) for f in fields(value)}
        return replace(value, **changed)
    return value
