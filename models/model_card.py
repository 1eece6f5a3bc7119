"""The README of an exported folder: what the model is, how it was trained, how to use it.

Training facts come from the checkpoint.json beside the weights; paths of the machine that trained
are left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from models.accounting import flops_per_token, parameter_count, state_bytes
from models.config import ModelConfig

_TRAINING_SECTIONS = ("batch", "optimizer", "schedule", "parallel", "training", "seed")

_USE = {
    "fenwick": """\
A model directory of Fenwick. From the root of its repository:

    python -m models generate FOLDER --prompt "..."
    python -m models inspect FOLDER
    python -m eval FOLDER --tasks perplexity,niah
""",
    "huggingface": """\
Needs torch and transformers (and sentencepiece for the tokenizer), nothing else. The code in this
folder was generated from Fenwick's own sources; `trust_remote_code=True` runs it.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
    prompt = tokenizer("...", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))

Prompts of unequal length are padded on the left (the tokenizer's default); padding never enters
the model's memory. Back to a model directory: `python -m models import FOLDER OUTPUT`.
""",
}


def model_card(
    config: ModelConfig, format_name: str, dtype: str, facts: Mapping[str, Any] | None
) -> str:
    """The text of README.md.

    Args:
        format_name: "fenwick" or "huggingface".
        dtype: how the matrices are stored, "fp32" or "bf16".
        facts: content of checkpoint.json; None where the source is no training checkpoint.
    """
    use = _USE[format_name]
    parts = [
        "---",
        "tags:",
        "- log-linear-attention",
        *(["library_name: transformers"] if format_name == "huggingface" else []),
        "---",
        "",
        "# Language model",
        "",
        _table(_model_rows(config, dtype)),
        "## Training",
        "",
        _training(facts),
        "## Use",
        "",
        use,
    ]
    return "\n".join(parts)


def _model_rows(config: ModelConfig, dtype: str) -> Iterator[tuple[str, str]]:
    mixers = config.layer_mixers
    length = config.max_seq_len
    yield "parameters", f"{parameter_count(config):,}"
    yield "layers", ", ".join(f"{mixers.count(m)} {m}" for m in dict.fromkeys(mixers))
    yield "width", f"{config.d_model}"
    yield "vocabulary", f"{config.vocab_size:,}"
    yield "longest document", f"{length:,} tokens, {config.num_levels} levels"
    if any(mixer.startswith("log_linear") for mixer in mixers):
        weights = config.level_weights
        yield "level weights", f"{weights.kind}, {weights.activation}"
    yield "FLOPs per training token", f"{flops_per_token(config, length):.3g} at {length:,} tokens"
    memory = state_bytes(config, length, activation_bytes=2)
    yield "memory of one sequence", f"{memory:,} bytes at {length:,} tokens"
    yield "stored as", "fp32" if dtype == "fp32" else "bf16 matrices, fp32 gates and norms"


def _training(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "No training record was beside the weights.\n"
    rows = [
        (name.replace("_", " "), _shown(facts[name]))
        for name in ("step", "tokens", "world_size", "zero_stage")
        if name in facts
    ]
    rows += [(f"data: {name}", text) for name, text in _leaves(facts.get("dataset"))]
    run = facts.get("config")
    if isinstance(run, Mapping):
        for section in _TRAINING_SECTIONS:
            rows += [
                (f"{section}.{name}" if name else section, text)
                for name, text in _leaves(run.get(section))
            ]
    return (
        _table(rows) if rows else "The training record beside the weights holds no known facts.\n"
    )


def _leaves(value: Any) -> Iterator[tuple[str, str]]:
    """Scalars of a nested section by dotted name; no paths, no lists of anything else."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            for name, text in _leaves(inner):
                yield (f"{key}.{name}" if name else str(key)), text
    elif isinstance(value, bool | int | float) or (isinstance(value, str) and "/" not in value):
        yield "", _shown(value)
    elif isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
        yield "", ", ".join(_shown(v) for v in value)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _table(rows: Any) -> str:
    lines = [f"| {name} | {text.replace('|', '/')} |" for name, text in rows]
    return "\n".join(["| | |", "|---|---|", *lines, ""])
