"""ModelConfig: everything that decides the shape of a model, and the presets.

A config is frozen, refuses unknown keys and is checked as a whole when it is built, so a wrong
number is named before anything is allocated. It is stored beside the weights (models/weights.py);
sizes derived from it are properties.

Letters: D d_model, H heads, G key/query groups, K key (state) size, V value size, L levels.
"""

from typing import Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kernels.levels import num_levels

MixerName: TypeAlias = Literal[
    "log_linear_mamba2", "log_linear_gated_deltanet", "mamba2", "gated_deltanet", "attention"
]
MIXER_NAMES: tuple[MixerName, ...] = get_args(MixerName)

# What the operators in kernels/ accept (DESIGN, "Signatures that stay").
SIZE_MULTIPLE = 16
MAX_KEY_SIZE = 256
MAX_VALUE_SIZE = 512
MAX_SEQ_LEN = 2**20


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LevelWeightsConfig(_Section):
    """How lambda, the weight of every level, is computed (models/level_weights.py)."""

    kind: Literal["fixed", "linear", "adaptive"] = "adaptive"
    activation: Literal["softplus", "softmax"] = "softplus"
    """softmax runs over the levels."""
    hidden_factor: int = Field(default=2, ge=1)
    """adaptive only: hidden width of the MLP = hidden_factor * L."""
    gelu: bool = False
    """adaptive only: a GELU between the two linear layers."""
    offset: float = 0.0
    """linear only: a constant added before the activation. With softplus lambda starts near
    softplus(offset): 0.69 for 0, and 1, as the other kinds do, for log(e - 1) = 0.5413."""
    tied_above: int | None = Field(default=None, ge=0)
    """All levels above this one share one weight, so that rows of any length have trained weights
    (as soon as training rows are longer than 2^tied_above tokens); null: a weight for every level.
    softmax runs over the weights, the shared one counted once."""
    grown_from: tuple[int, ...] = ()
    """How many weights there were before each extension (`python -m models extend-context` sets
    it): those are computed on their own, so that they keep every bit."""

    @model_validator(mode="after")
    def _adaptive_settings_belong_to_adaptive(self) -> "LevelWeightsConfig":
        if self.kind != "adaptive" and (self.gelu or self.hidden_factor != 2):
            raise ValueError(
                f"level_weights.gelu and level_weights.hidden_factor act on kind 'adaptive' only: "
                f"got kind '{self.kind}'; leave them out"
            )
        if self.kind != "linear" and self.offset:
            raise ValueError(
                f"level_weights.offset acts on kind 'linear' only: got {self.offset} with kind "
                f"'{self.kind}'; leave it out"
            )
        return self

    def num_weights(self, num_levels: int) -> int:
        """Weights for so many levels: one each, or tied_above + 1 and a shared one."""
        return num_levels if self.tied_above is None else min(num_levels, self.tied_above + 2)


class Mamba2Config(_Section):
    """Sizes of a Mamba-2 mixer; its number of heads is expand * d_model / head_size."""

    head_size: int = Field(default=64, ge=1)
    """V."""
    state_size: int = Field(default=128, ge=1)
    """K."""
    num_groups: int = Field(default=1, ge=1)
    """G: key/query pairs, each shared by H / G heads."""
    expand: int = Field(default=2, ge=1)
    conv_width: int = Field(default=4, ge=2)
    """Tokens seen by the short convolution."""


class GatedDeltaNetConfig(_Section):
    """Sizes of a Gated DeltaNet mixer."""

    num_heads: int = Field(default=4, ge=1)
    key_size: int = Field(default=64, ge=1)
    value_size: int = Field(default=128, ge=1)
    conv_width: int = Field(default=4, ge=2)
    """Tokens seen by the short convolutions."""
    scale_queries: bool = True
    """Divide queries by sqrt(key_size); the log-linear authors' released models do not."""


class AttentionConfig(_Section):
    """Softmax attention; the size of a head is d_model / num_heads."""

    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key/value heads, each shared by num_heads / num_kv_heads query heads; null: num_heads."""
    window: int | None = Field(default=None, ge=1)
    """Tokens that a token sees, itself included; null: the whole document."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before the rotation."""
    rope_theta: float = Field(default=500_000.0, gt=1.0)

    @property
    def kv_heads(self) -> int:
        """num_kv_heads, the default written out."""
        return self.num_kv_heads or self.num_heads


class MLPConfig(_Section):
    """SwiGLU after every mixer."""

    hidden_size: int = Field(ge=0)
    """Width of gate and up; 0 leaves the MLP and its norm out."""


class ModelConfig(_Section):
    """Shape of a language model: embedding, num_layers x (mixer, MLP), norm, output projection."""

    vocab_size: int = Field(ge=2)
    d_model: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    mixer: MixerName | tuple[MixerName, ...] = "log_linear_mamba2"
    """One mixer, or a pattern of mixers repeated over the layers (a hybrid)."""
    max_seq_len: int = Field(ge=1, le=MAX_SEQ_LEN)
    """Longest document in tokens; fixes the number of levels."""
    mlp: MLPConfig
    tie_embeddings: bool = False
    logit_soft_cap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Output logits become cap * tanh(logits / cap); null: they stay."""
    norm_eps: float = Field(default=1e-5, gt=0)
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of projections and embeddings at the start."""
    rescale_residual_init: bool = True
    """Divide the start of projections into the residual stream by sqrt(number of those)."""
    level_weights: LevelWeightsConfig = LevelWeightsConfig()
    mamba2: Mamba2Config = Mamba2Config()
    gated_deltanet: GatedDeltaNetConfig = GatedDeltaNetConfig()
    attention: AttentionConfig = AttentionConfig()

    @property
    def num_levels(self) -> int:
        """L of every log-linear layer: enough for a document of max_seq_len tokens."""
        return num_levels(self.max_seq_len)

    @property
    def num_level_weights(self) -> int:
        """Weights per head of every log-linear layer: fewer than levels where some are tied."""
        return self.level_weights.num_weights(self.num_levels)

    @property
    def layer_mixers(self) -> tuple[MixerName, ...]:
        """The mixer of each layer, the pattern written out."""
        pattern = (self.mixer,) if isinstance(self.mixer, str) else self.mixer
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    @property
    def mamba2_inner_size(self) -> int:
        """H * V of the Mamba-2 mixers."""
        return self.mamba2.expand * self.d_model

    @property
    def mamba2_num_heads(self) -> int:
        return self.mamba2_inner_size // self.mamba2.head_size

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ModelConfig":
        if not isinstance(self.mixer, str) and not 1 <= len(self.mixer) <= self.num_layers:
            raise ValueError(
                f"mixer pattern has {len(self.mixer)} entries: "
                f"expected 1 to num_layers={self.num_layers}"
            )
        used = set(self.layer_mixers)
        if used & {"mamba2", "log_linear_mamba2"}:
            self._check_mamba2()
        if used & {"gated_deltanet", "log_linear_gated_deltanet"}:
            _check_operator_size(
                "gated_deltanet.key_size", self.gated_deltanet.key_size, MAX_KEY_SIZE
            )
            _check_operator_size(
                "gated_deltanet.value_size", self.gated_deltanet.value_size, MAX_VALUE_SIZE
            )
        if "attention" in used:
            self._check_attention()
        self._check_level_weights()
        return self

    def _check_level_weights(self) -> None:
        tied, grown = self.level_weights.tied_above, self.level_weights.grown_from
        if tied is not None and tied > self.num_levels - 2:
            raise ValueError(
                f"level_weights.tied_above={tied} ties nothing: max_seq_len={self.max_seq_len} has "
                f"levels 0 to {self.num_levels - 1}; expected at most {self.num_levels - 2}"
            )
        bounds = (0, *grown, self.num_level_weights)
        if any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
            raise ValueError(
                f"level_weights.grown_from must rise from 1 to less than the "
                f"{self.num_level_weights} weights of max_seq_len={self.max_seq_len}: "
                f"got {list(grown)}"
            )

    def _check_mamba2(self) -> None:
        section = self.mamba2
        _check_operator_size("mamba2.state_size", section.state_size, MAX_KEY_SIZE)
        _check_operator_size("mamba2.head_size", section.head_size, MAX_VALUE_SIZE)
        if self.mamba2_inner_size % section.head_size:
            raise ValueError(
                f"mamba2.head_size={section.head_size} does not divide mamba2.expand * d_model = "
                f"{section.expand} * {self.d_model} = {self.mamba2_inner_size}; choose a divisor"
            )
        if self.mamba2_num_heads % section.num_groups:
            raise ValueError(
                f"mamba2.num_groups={section.num_groups} does not divide the "
                f"{self.mamba2_num_heads} heads (expand * d_model / head_size); choose a divisor"
            )

    def _check_attention(self) -> None:
        heads = self.attention.num_heads
        if self.d_model % heads:
            raise ValueError(
                f"attention.num_heads={heads} does not divide d_model={self.d_model}; "
                "choose a divisor"
            )
        if heads % self.attention.kv_heads:
            raise ValueError(
                f"attention.num_kv_heads={self.attention.kv_heads} does not divide "
                f"attention.num_heads={heads}; choose a divisor"
            )
        if (self.d_model // heads) % 2:
            raise ValueError(
                f"attention head size must be even for rotary positions: got d_model / num_heads = "
                f"{self.d_model} / {heads} = {self.d_model // heads}"
            )


def check_document_length(config: ModelConfig, tokens: int, what: str = "document") -> None:
    """ValueError, with the way out, unless the model has levels for a row of so many tokens."""
    if tokens <= config.max_seq_len:
        return
    raise ValueError(
        f"{what} too long for the model: got {tokens} tokens; expected at most "
        f"max_seq_len={config.max_seq_len}; cut it{extension_advice(tokens)}"
    )


def extension_advice(tokens: int) -> str:
    """How to get a model that reads so many tokens, to end an error message; empty if none can."""
    if tokens > MAX_SEQ_LEN:
        return ""
    enough = 1 << (tokens - 1).bit_length()
    return (
        " or grow the model: python -m models extend-context CHECKPOINT OUTPUT "
        f"--max-seq-len {enough}"
    )


def _check_operator_size(name: str, value: int, largest: int) -> None:
    if value % SIZE_MULTIPLE or value > largest:
        raise ValueError(
            f"{name} must be a multiple of {SIZE_MULTIPLE} up to {largest}: got {value}"
        )


def _presets() -> dict[str, ModelConfig]:
    tiny = {
        "vocab_size": 2048,
        "d_model": 128,
        "num_layers": 4,
        "max_seq_len": 2048,
        "tie_embeddings": True,
        "init_std": 0.05,
        "mlp": {"hidden_size": 384},
        "mamba2": {"head_size": 32, "state_size": 32},
        "gated_deltanet": {"num_heads": 4, "key_size": 32, "value_size": 64},
        "attention": {"num_heads": 4},
    }
    small = {
        "vocab_size": 32_000,
        "d_model": 768,
        "num_layers": 12,
        "max_seq_len": 16_384,
        "tie_embeddings": True,
        "mlp": {"hidden_size": 2048},
        "gated_deltanet": {"num_heads": 3, "key_size": 192, "value_size": 384},
        "attention": {"num_heads": 12},
    }
    # The models of the log-linear attention paper: 50B tokens of 16,384-token rows.
    paper = {
        "vocab_size": 32_000,
        "d_model": 1536,
        "num_layers": 21,
        "max_seq_len": 16_384,
        "init_std": 0.006,
        "mlp": {"hidden_size": 4096},
        "gated_deltanet": {"num_heads": 6, "key_size": 192, "value_size": 384},
        "attention": {"num_heads": 16},
    }
    presets: dict[str, ModelConfig] = {}
    for size, settings in (("tiny", tiny), ("125m", small), ("0.8b", paper)):
        for mixer in MIXER_NAMES:
            name = f"{size}-{mixer.replace('_', '-')}"
            presets[name] = ModelConfig.model_validate({**settings, "mixer": mixer})
    # The paper's second transformer has three layers more, to match the others' size.
    presets["0.8b-attention-24-layers"] = ModelConfig.model_validate(
        {**paper, "mixer": "attention", "num_layers": 24}
    )
    return presets


PRESETS: dict[str, ModelConfig] = _presets()
