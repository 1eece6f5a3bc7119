"""Parameters, FLOPs and memory of a model, from its ModelConfig alone.

FLOPs are those of the specification, a multiply-add counted as 2: what has to be computed, not what
a chunked kernel does on top to be fast. Work that is elementwise in the tokens (norms, gates,
activations, decay, the carry) is left out. Per token and head, with p = number of levels that hold
past tokens:

    log-linear SSD      insert 2KV + reads 2KV p + own token 2(K + V)
    SSD                 insert 2KV + read 2KV
    log-linear delta    insert 2KV + corrections 4KV p + reads 2KV p + own token 2(K + V)
    gated delta         correction and insert 4KV + read 2KV
    softmax, head of V  scores and values 4V per visible token (window of them at most)

p is the number of 1-bits of the position, about log2(T) / 2 on average over a row: the work per
token of a log-linear model grows with log T, that of softmax attention with T. The backward pass
does each product twice.
"""

from kernels.levels import num_levels
from models.config import ModelConfig


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters of LanguageModel(config); tied embeddings count once."""
    D = config.d_model
    embeddings = config.vocab_size * D * (1 if config.tie_embeddings else 2)
    mlp = 3 * D * config.mlp.hidden_size + D if config.mlp.hidden_size else 0
    mixers = sum(D + _mixer_parameters(config, mixer) for mixer in config.layer_mixers)
    return embeddings + mixers + config.num_layers * mlp + D


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of the forward pass per token, averaged over a document of seq_len tokens."""
    D = config.d_model
    mlp = 2 * 3 * D * config.mlp.hidden_size
    mixers = sum(_mixer_flops(config, mixer, seq_len) for mixer in config.layer_mixers)
    return mixers + config.num_layers * mlp + 2 * D * config.vocab_size


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of forward and backward pass per token, averaged over a document of seq_len tokens.

    Nothing that is recomputed to save memory is counted.
    """
    return 3 * forward_flops_per_token(config, seq_len)


def hardware_flops_per_token(config: ModelConfig, seq_len: int, recomputes_blocks: bool) -> float:
    """FLOPs that are computed per token: `flops_per_token`, and the blocks' forward pass once more
    where it is computed again to save memory. The output matrix never is.
    """
    again = forward_flops_per_token(config, seq_len) - 2 * config.d_model * config.vocab_size
    return flops_per_token(config, seq_len) + (again if recomputes_blocks else 0)


def training_state_bytes(
    config: ModelConfig, zero_stage: int, ranks: int, moments: float = 2
) -> dict[str, float]:
    """Memory of one rank for what a training step keeps, all of it fp32, by kind.

    ZeRO shares out the optimizer's state and a copy of the parameters that it updates from stage 1
    on, gradients from stage 2 on, parameters at stage 3 (then the copy is all there is of them).

    Args:
        moments: numbers the optimizer keeps of a parameter, on average.
    """
    whole = 4.0 * parameter_count(config)
    share = whole / ranks
    return {
        "parameters": whole if zero_stage < 3 else share,
        "master copy": 0.0 if zero_stage == 0 else share,
        "gradients": whole if zero_stage < 2 else share,
        "optimizer": moments * (whole if zero_stage == 0 else share),
    }


def state_bytes(config: ModelConfig, seq_len: int, activation_bytes: int = 4) -> int:
    """Memory between two calls that one sequence of seq_len tokens needs.

    Args:
        activation_bytes: size of a number in KV caches and convolution tails (2 under bf16
            autocast); the states of recurrent layers are fp32 always. A model allocates its levels
            for max_seq_len.
    """
    return sum(_mixer_state(config, m, seq_len, activation_bytes) for m in config.layer_mixers)


def mean_past_levels(seq_len: int) -> float:
    """Levels that hold past tokens (1-bits of the position), mean over positions 0..seq_len-1."""
    ones = 0
    for bit in range(seq_len.bit_length()):
        period = 2 << bit
        ones += seq_len // period * (period // 2) + max(0, seq_len % period - period // 2)
    return ones / seq_len


def _is_log_linear(mixer: str) -> bool:
    return mixer.startswith("log_linear_")


def _head_sizes(config: ModelConfig, mixer: str) -> tuple[int, int, int]:
    """(H, K, V) of a recurrent mixer."""
    if mixer.endswith("mamba2"):
        return config.mamba2_num_heads, config.mamba2.state_size, config.mamba2.head_size
    sizes = config.gated_deltanet
    return sizes.num_heads, sizes.key_size, sizes.value_size


def _kv_size(config: ModelConfig) -> int:
    """Numbers in the keys of one token."""
    return config.d_model // config.attention.num_heads * config.attention.kv_heads


def _mean_visible(seq_len: int, window: int | None) -> float:
    """Tokens that a token sees, itself included, mean over a document."""
    w = min(window or seq_len, seq_len)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len


def _conv(config: ModelConfig, mixer: str) -> tuple[int, int]:
    """(channels, width) of a recurrent mixer's short convolution."""
    H, K, V = _head_sizes(config, mixer)
    if mixer.endswith("mamba2"):
        return H * V + 2 * config.mamba2.num_groups * K, config.mamba2.conv_width
    return H * (2 * K + V), config.gated_deltanet.conv_width


def _projections(config: ModelConfig, mixer: str) -> int:
    """Numbers in the matrices that a token passes through, lambda's included."""
    D = config.d_model
    if mixer == "attention":
        return 2 * D * D + 2 * D * _kv_size(config)
    H, _, V = _head_sizes(config, mixer)
    channels, _ = _conv(config, mixer)
    gates = H if mixer.endswith("mamba2") else 2 * H  # dt; or decay and beta
    level_proj = 0
    if _is_log_linear(mixer) and config.level_weights.kind != "fixed":
        level_proj = H * config.num_level_weights
    return D * (H * V + channels + gates + level_proj) + H * V * D


def _mixer_parameters(config: ModelConfig, mixer: str) -> int:
    if mixer == "attention":
        norms = 2 * config.d_model // config.attention.num_heads if config.attention.qk_norm else 0
        return _projections(config, mixer) + norms
    H, _, V = _head_sizes(config, mixer)
    channels, width = _conv(config, mixer)
    if mixer.endswith("mamba2"):
        small = (
            channels * (width + 1) + 3 * H + H * V
        )  # convolution and bias; A_log, dt_bias, D; norm
    else:
        small = channels * width + 2 * H + V  # convolution; A_log, dt_bias; norm of one head
    return _projections(config, mixer) + small + _level_weights_parameters(config, mixer, H)


def _level_weights_parameters(config: ModelConfig, mixer: str, H: int) -> int:
    L = config.num_level_weights
    if not _is_log_linear(mixer):
        return 0
    if config.level_weights.kind == "adaptive":
        return 2 * L * config.level_weights.hidden_factor * L + L
    return H * L


def _mixer_flops(config: ModelConfig, mixer: str, seq_len: int) -> float:
    matrices = 2 * _projections(config, mixer)
    if mixer == "attention":
        return matrices + 4 * config.d_model * _mean_visible(seq_len, config.attention.window)
    H, K, V = _head_sizes(config, mixer)
    channels, width = _conv(config, mixer)
    small = 2 * channels * width
    delta = not mixer.endswith("mamba2")
    if not _is_log_linear(mixer):
        return matrices + small + H * K * V * (6 if delta else 4)
    past = mean_past_levels(seq_len)
    operator = 2 * K * V + (6 if delta else 2) * K * V * past + 2 * (K + V)
    if config.level_weights.kind == "adaptive":
        L = config.num_level_weights
        hidden = config.level_weights.hidden_factor * L
        small += H * 2 * 2 * L * hidden
    return matrices + small + H * operator


def _mixer_state(config: ModelConfig, mixer: str, seq_len: int, activation_bytes: int) -> int:
    if mixer == "attention":
        kept = min(seq_len, config.attention.window or seq_len)
        return 2 * _kv_size(config) * kept * activation_bytes
    H, K, V = _head_sizes(config, mixer)
    channels, width = _conv(config, mixer)
    levels = num_levels(seq_len) if _is_log_linear(mixer) else 1
    return 4 * H * levels * K * V + channels * (width - 1) * activation_bytes
