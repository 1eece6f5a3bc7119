"""Settings of other people's checkpoints: none of them may be overlooked."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

# These set training, speed or starting values, not what a model computes.
_WITHOUT_EFFECT = """
A_init_range attn_mode auto_map architectures chunk_size chunk_size_feed_forward conv_init
dt_init_floor dt_max dt_min dtype fuse_cross_entropy fuse_linear_cross_entropy fuse_norm
fuse_swiglu fused_add_norm initializer_range intermediate_size hidden_ratio
max_position_embeddings model_type pad_vocab_size_multiple rescale_prenorm_residual
residual_in_fp32 time_step_floor time_step_max time_step_min time_step_rank torch_dtype
transformers_version use_cache use_l2warp use_mem_eff_path
"""
# Every configuration of transformers has these; they are about other kinds of models, or about
# generation.
_IN_EVERY_CONFIG = """
_attn_implementation_autoset _name_or_path add_cross_attention bad_words_ids
begin_suppress_tokens cross_attention_hidden_size decoder_start_token_id diversity_penalty
do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder
is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size
num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty
return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
typical_p use_bfloat16
"""
_IGNORED = frozenset(f"{_WITHOUT_EFFECT} {_IN_EVERY_CONFIG}".split())


class Settings:
    """Entries of a config.json; every one of them is used, expected to have a value, or known to
    be without effect.

    source: the file's name in errors; prefix: what stands before the names of a nested section.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values, self.source, self.prefix = values, source, prefix
        self.used: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The value, or the default where there is none."""
        self.used.add(name)
        return self.values.get(name, default)

    def need(self, name: str) -> Any:
        """The value; ValueError where there is none."""
        if name not in self.values:
            raise ValueError(f"{self.source}: {self.prefix}{name} is missing")
        return self.take(name)

    def first(self, names: Collection[str], default: Any) -> Any:
        """The value under the first of several names that is there."""
        self.used.update(names)
        return next((self.values[name] for name in names if name in self.values), default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuses a value that changes what the model computes; absent is allowed."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{self.source}: {self.prefix}{name} is {value!r}, which ours cannot express; "
                f"expected {' or '.join(map(repr, allowed))}"
            )

    def finish(self) -> None:
        """ValueError that names every setting nobody asked for."""
        unknown = sorted(self.values.keys() - self.used - _IGNORED)
        if unknown:
            raise ValueError(
                f"{self.source}: settings that are not known here: "
                f"{', '.join(self.prefix + name for name in unknown)}; they might change what the "
                "model computes"
            )


def read_settings(directory: Path) -> dict[str, Any]:
    """config.json of a foreign folder.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: it is not a JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint in {directory}: expected a folder with config.json")
    try:
        settings = json.loads(path.read_bytes(), object_hook=_number)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object")
    return settings


def _number(value: dict[str, Any]) -> Any:
    """transformers 5 writes what JSON has no number for as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
