"""Models of other code bases as ours: their settings, and which of their tensors is which of ours.

    fla         flash-linear-attention: mamba2, gated_deltanet, log_linear_mamba2
    hattention  the log-linear attention authors' code: hattention, h_gated_deltanet
    mamba_ssm   state-spaces/mamba: Mamba-2

Differences between them that matter:

  * lambda = softplus(L * dl) everywhere, our kind `linear`; Mamba-2 variants compute dl inside
    in_proj, Gated DeltaNet variants in l_proj. Their number of levels, 15, fixes max_seq_len.
  * hattention's Gated DeltaNet multiplies lambda by sqrt(K), which undoes the division of the
    queries: `gated_deltanet.scale_queries` is off for it.
  * The gated norm of Mamba-2 spans the whole width in hattention, one group in the others; with
    several groups only the former is ours.

A setting that changes what the model computes and that ours cannot express is refused by name; so
is one that is not known here. Sizes are read from the tensors where they can be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from models.config import MAX_SEQ_LEN, ModelConfig
from models.foreign_settings import Settings, read_settings
from models.foreign_tensors import (
    Tensors,
    open_weights,
    rows,
    stacked,
    without_middle,
)
from models.generation_settings import GenerationSettings
from models.tensor_files import LazyTensor

ForeignFormat = Literal["fla", "hattention", "mamba_ssm"]

_INFINITE_LIMIT = [0.0, float("inf")]
_SILU = ("silu", "swish")


@dataclass(frozen=True)
class Foreign:
    """A model of another code base in our terms; tensors by our names, still on disk."""

    config: ModelConfig
    tensors: dict[str, LazyTensor]
    generation: GenerationSettings


def read_foreign(directory: Path, source: ForeignFormat, max_seq_len: int | None) -> Foreign:
    """The model in a folder with config.json and weights of another code base.

    Args:
        max_seq_len: longest document, for models without levels; None: as long as ours may be. The
            levels of a log-linear model fix it.

    Raises:
        FileNotFoundError: no config.json or no weights.
        ValueError: a setting or a tensor that ours has no place for, or one that is missing.
    """
    settings = Settings(read_settings(directory), f"{directory / 'config.json'}")
    tensors = Tensors(open_weights(directory), f"{directory}")
    if source == "mamba_ssm":
        return _mamba_ssm(settings, tensors, max_seq_len)
    kind = settings.take("model_type")
    readers = _FLA if source == "fla" else _HATTENTION
    if kind not in readers:
        raise ValueError(
            f"{settings.source}: model_type {kind!r} is not a {source} model that ours can be; "
            f"expected one of {', '.join(readers)}"
        )
    return readers[kind](settings, tensors, max_seq_len)


def _log_linear_mamba2(
    settings: Settings, tensors: Tensors, max_seq_len: int | None, mixer_norm_groups: bool
) -> Foreign:
    """FLA's LogLinearMamba2ForCausalLM and hattention's HAttentionForCausalLM."""
    L = tensors.shape("backbone.layers.0.mixer.L", 2)[1]
    mlp = {"hidden_size": tensors.shape("backbone.layers.0.mlp.gate_proj.weight", 2)[0]}
    config, generation = _mamba2_config(
        settings,
        mixer_norm_groups,
        mixer="log_linear_mamba2",
        max_seq_len=_max_seq_len_of(L, max_seq_len, settings.source),
        mlp=mlp,
        level_weights={"kind": "linear"},
    )
    ours = _outer(tensors, config, "backbone.", "backbone.norm_f.weight")
    for i in range(config.num_layers):
        theirs = f"backbone.layers.{i}."
        block = f"blocks.{i}."
        ours |= _mamba2_mixer(tensors, config, f"{theirs}mixer.", f"{block}mixer.", L)
        for norm in ("mixer_norm", "mlp_norm"):
            ours[f"{block}{norm}.weight"] = tensors.take(f"{theirs}{norm}.weight")
        ours |= _swiglu(tensors, theirs, block)
    tensors.finish()
    return Foreign(config, ours, generation)


def _fla_mamba2(settings: Settings, tensors: Tensors, max_seq_len: int | None) -> Foreign:
    """FLA's Mamba2ForCausalLM (and the one of transformers, which has the same names)."""
    config, generation = _mamba2_config(
        settings,
        True,
        mixer="mamba2",
        max_seq_len=max_seq_len or MAX_SEQ_LEN,
        mlp={"hidden_size": 0},
    )
    ours = _outer(tensors, config, "backbone.", "backbone.norm_f.weight")
    for i in range(config.num_layers):
        theirs = f"backbone.layers.{i}."
        ours[f"blocks.{i}.mixer_norm.weight"] = tensors.take(f"{theirs}norm.weight")
        ours |= _mamba2_mixer(tensors, config, f"{theirs}mixer.", f"blocks.{i}.mixer.", 0)
    tensors.finish()
    return Foreign(config, ours, generation)


def _mamba_ssm(settings: Settings, tensors: Tensors, max_seq_len: int | None) -> Foreign:
    """mamba_ssm's MambaLMHeadModel with Mamba-2 layers."""
    ssm = Settings(settings.take("ssm_cfg") or {}, settings.source, "ssm_cfg.")
    if ssm.take("layer", "Mamba1") != "Mamba2":
        raise ValueError(
            f"{settings.source}: ssm_cfg.layer is {ssm.take('layer', 'Mamba1')!r}, which ours "
            "cannot express; expected 'Mamba2'"
        )
    settings.expect("rms_norm", True)
    settings.expect("attn_layer_idx", [], None)
    settings.take("attn_cfg")  # of the layers in attn_layer_idx, of which there are none
    ssm.expect("ngroups", 1)
    ssm.expect("d_ssm", None)
    ssm.expect("D_has_hdim", False)
    ssm.expect("rmsnorm", True)
    ssm.expect("norm_before_gate", False)
    ssm.expect("bias", False)
    ssm.expect("conv_bias", True)
    ssm.expect("dt_limit", _INFINITE_LIMIT)
    d_model = settings.need("d_model")
    mlp_size = settings.take("d_intermediate", 0)
    if mlp_size:
        mlp_size = tensors.shape("backbone.layers.0.mlp.fc1.weight", 2)[0] // 2
    settings.take("vocab_size")  # the embedding has it, padded
    config = _config(
        settings.source,
        mixer="mamba2",
        vocab_size=tensors.shape("backbone.embedding.weight", 2)[0],
        d_model=d_model,
        num_layers=settings.need("n_layer"),
        max_seq_len=max_seq_len or MAX_SEQ_LEN,
        mlp={"hidden_size": mlp_size},
        tie_embeddings=settings.take("tie_embeddings", True),
        norm_eps=1e-5,
        mamba2={
            "head_size": ssm.take("headdim", 64),
            "state_size": ssm.take("d_state", 128),
            "expand": ssm.take("expand", 2),
            "conv_width": ssm.take("d_conv", 4),
        },
    )
    ssm.finish()
    settings.finish()
    ours = _outer(tensors, config, "backbone.", "backbone.norm_f.weight")
    for i in range(config.num_layers):
        theirs, block = f"backbone.layers.{i}.", f"blocks.{i}."
        ours[f"{block}mixer_norm.weight"] = tensors.take(f"{theirs}norm.weight")
        ours |= _mamba2_mixer(tensors, config, f"{theirs}mixer.", f"{block}mixer.", 0)
        if mlp_size:
            # y, gate = fc1(x): the first half is multiplied by silu of the second.
            both = tensors.take(f"{theirs}mlp.fc1.weight")
            ours[f"{block}mlp_norm.weight"] = tensors.take(f"{theirs}norm2.weight")
            ours[f"{block}mlp.up_proj.weight"] = rows(both, 0, mlp_size)
            ours[f"{block}mlp.gate_proj.weight"] = rows(both, mlp_size, 2 * mlp_size)
            ours[f"{block}mlp.down_proj.weight"] = tensors.take(f"{theirs}mlp.fc2.weight")
    tensors.finish()
    return Foreign(config, ours, GenerationSettings())


def _gated_deltanet(
    settings: Settings, tensors: Tensors, max_seq_len: int | None, log_linear: bool
) -> Foreign:
    """FLA's GatedDeltaNetForCausalLM, hattention's HGatedDeltaNetForCausalLM."""
    heads = settings.need("num_heads")
    settings.expect("num_v_heads", None, heads)
    settings.expect("use_gate", True)
    settings.expect("use_short_conv", True)
    settings.expect("allow_neg_eigval", False)
    settings.expect("hidden_act", *_SILU)
    settings.expect("output_gate_activation", *_SILU)
    settings.expect("attn", None)
    settings.expect("attnres_block_size", None)
    settings.expect("matrix_router", False)
    key_size = settings.need("head_dim")
    L = tensors.shape("model.layers.0.attn.L", 2)[1] if log_linear else 0
    config = _config(
        settings.source,
        mixer="log_linear_gated_deltanet" if log_linear else "gated_deltanet",
        vocab_size=settings.need("vocab_size"),
        d_model=settings.take("hidden_size", 2048),
        num_layers=settings.need("num_hidden_layers"),
        max_seq_len=(
            _max_seq_len_of(L, max_seq_len, settings.source)
            if log_linear
            else max_seq_len or MAX_SEQ_LEN
        ),
        mlp={"hidden_size": tensors.shape("model.layers.0.mlp.gate_proj.weight", 2)[0]},
        tie_embeddings=settings.take("tie_word_embeddings", False),
        norm_eps=settings.take("norm_eps", 1e-6),
        level_weights={"kind": "linear"} if log_linear else {},
        gated_deltanet={
            "num_heads": heads,
            "key_size": key_size,
            "value_size": int(key_size * settings.take("expand_v", 2)),
            "conv_width": settings.take("conv_size", 4),
            "scale_queries": not log_linear,
        },
    )
    generation = _generation(settings)
    settings.finish()
    ours = _outer(tensors, config, "model.", "model.norm.weight")
    for i in range(config.num_layers):
        theirs, block = f"model.layers.{i}.", f"blocks.{i}."
        ours[f"{block}mixer_norm.weight"] = tensors.take(f"{theirs}attn_norm.weight")
        ours[f"{block}mlp_norm.weight"] = tensors.take(f"{theirs}mlp_norm.weight")
        ours |= _gated_deltanet_mixer(tensors, f"{theirs}attn.", f"{block}mixer.", log_linear)
        ours |= _swiglu(tensors, theirs, block)
    tensors.finish()
    return Foreign(config, ours, generation)


_Reader = Callable[[Settings, Tensors, int | None], Foreign]

_FLA: dict[str, _Reader] = {
    "mamba2": _fla_mamba2,
    "gated_deltanet": lambda s, t, n: _gated_deltanet(s, t, n, log_linear=False),
    "log_linear_mamba2": lambda s, t, n: _log_linear_mamba2(s, t, n, mixer_norm_groups=True),
}
_HATTENTION: dict[str, _Reader] = {
    "hattention": lambda s, t, n: _log_linear_mamba2(s, t, n, mixer_norm_groups=False),
    "h_gated_deltanet": lambda s, t, n: _gated_deltanet(s, t, n, log_linear=True),
}


def _mamba2_config(
    settings: Settings, mixer_norm_groups: bool, **fields: Any
) -> tuple[ModelConfig, GenerationSettings]:
    """The settings that FLA's and hattention's Mamba-2 share.

    mixer_norm_groups: their gated norm has one group per key/query group.
    """
    if mixer_norm_groups:
        settings.expect("n_groups", 1)
        settings.expect("norm_before_gate", False)
    else:
        settings.take("norm_before_gate")  # hattention passes False whatever it says
    settings.expect("use_bias", False)
    settings.expect("use_conv_bias", True)
    settings.expect("D_has_hdim", False)
    settings.expect("hidden_act", *_SILU)
    settings.expect("rmsnorm", True)
    settings.expect("rms_norm", True)
    settings.expect("dt_limit", _INFINITE_LIMIT)
    settings.expect("time_step_limit", _INFINITE_LIMIT)
    settings.expect("attnres_block_size", None)
    d_model, expand = settings.need("hidden_size"), settings.take("expand", 2)
    head_size = settings.take("head_dim", 64)
    settings.expect("num_heads", int(expand * d_model / head_size))
    config = _config(
        settings.source,
        vocab_size=settings.need("vocab_size"),
        d_model=d_model,
        num_layers=settings.need("num_hidden_layers"),
        tie_embeddings=settings.take("tie_word_embeddings", False),
        norm_eps=settings.first(("norm_eps", "layer_norm_epsilon"), 1e-5),
        mamba2={
            "head_size": head_size,
            "state_size": settings.take("state_size", 128),
            "num_groups": settings.take("n_groups", 1),
            "expand": expand,
            "conv_width": settings.take("conv_kernel", 4),
        },
        **fields,
    )
    generation = _generation(settings)
    settings.finish()
    return config, generation


def _mamba2_mixer(
    tensors: Tensors, config: ModelConfig, theirs: str, ours: str, L: int
) -> dict[str, LazyTensor]:
    """in_proj = [z | x k q | dt | dl], dl only with L > 0 levels."""
    sizes = config.mamba2
    inner, H = config.mamba2_inner_size, config.mamba2_num_heads
    width = 2 * inner + 2 * sizes.num_groups * sizes.state_size + H
    in_proj = tensors.take(f"{theirs}in_proj.weight")
    found = {
        "in_proj.weight": rows(in_proj, 0, width) if L else in_proj,
        "conv.weight": without_middle(tensors.take(f"{theirs}conv1d.weight")),
        "conv.bias": tensors.take(f"{theirs}conv1d.bias"),
    }
    for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight"):
        found[name] = tensors.take(theirs + name)
    if L:
        found["level_proj.weight"] = rows(in_proj, width, width + H * L)
        found["level_weights.a"] = tensors.take(f"{theirs}L")
        if in_proj.shape[0] not in (0, width + H * L):
            raise ValueError(
                f"{tensors.source} does not fit: {theirs}in_proj.weight has {in_proj.shape[0]} "
                f"rows; expected {width + H * L}"
            )
    return {ours + name: tensor for name, tensor in found.items()}


def _gated_deltanet_mixer(
    tensors: Tensors, theirs: str, ours: str, log_linear: bool
) -> dict[str, LazyTensor]:
    convolutions = [without_middle(tensors.take(f"{theirs}{x}_conv1d.weight")) for x in "qkv"]
    found = {
        "conv.weight": stacked(convolutions),
        "norm.weight": tensors.take(f"{theirs}o_norm.weight"),
    }
    for name in ("A_log", "dt_bias", *(f"{x}_proj.weight" for x in "qkvabgo")):
        found[name] = tensors.take(theirs + name)
    if log_linear:
        found["level_proj.weight"] = tensors.take(f"{theirs}l_proj.weight")
        found["level_weights.a"] = tensors.take(f"{theirs}L")
    return {ours + name: tensor for name, tensor in found.items()}


def _swiglu(tensors: Tensors, theirs: str, ours: str) -> dict[str, LazyTensor]:
    names = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    return {ours + name: tensors.take(theirs + name) for name in names}


def _outer(tensors: Tensors, config: ModelConfig, prefix: str, norm: str) -> dict[str, LazyTensor]:
    """Embedding, last norm and output projection; old files say embedding, new ones embeddings."""
    names = [f"{prefix}embeddings.weight", f"{prefix}embedding.weight"]
    name = next((n for n in names if n in tensors.tensors), names[0])
    found = {"embedding.weight": tensors.take(name), "norm.weight": tensors.take(norm)}
    if not config.tie_embeddings:
        found["lm_head.weight"] = tensors.take("lm_head.weight")
    elif "lm_head.weight" in tensors.tensors:
        tensors.take("lm_head.weight")  # the same tensor once more
    return found


def _max_seq_len_of(L: int, wanted: int | None, source: str) -> int:
    """The longest document that L levels serve."""
    if wanted is not None:
        raise ValueError(
            f"max_seq_len is fixed by the {L} levels of {source}: got {wanted}; leave it out, and "
            "lengthen the result with python -m models extend-context"
        )
    return 1 << (L - 1)


def _generation(settings: Settings) -> GenerationSettings:
    found = {name: settings.take(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    bos, eos, pad = (i if isinstance(i, int) else None for i in found.values())
    return GenerationSettings(bos, eos, pad)


def _config(source: str, **fields: Any) -> ModelConfig:
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{source} describes no model of ours: {where} {first['msg']}") from None
