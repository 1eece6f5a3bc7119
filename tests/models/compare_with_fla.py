"""Logits of FLA's own models against ours after `python -m models import --from fla`.

    python tests/models/compare_with_fla.py [cpu|cuda] [TOKENS]

Needs flash-linear-attention 0.6 beside our own requirements (PYTHONPATH may point to it). On a
GPU its kernels run as they are. On a CPU they run in Triton's interpreter, each with its first
tuning, and the one kernel that the interpreter cannot run is FLA's own dense form instead; at most
64 tokens, because beyond them its delta rule takes another kernel of that kind.
Prints one line for each model; exit code 1 where logits differ.
"""

import os
import sys
import tempfile
from pathlib import Path

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
T = int(sys.argv[2]) if len(sys.argv) > 2 else (60 if device == "cpu" else 1024)
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402
import transformers.configuration_utils as configuration_utils  # noqa: E402
from torch import nn  # noqa: E402

# FLA 0.6 says what transformers 5 says; transformers 4 spells it otherwise.
if not hasattr(configuration_utils, "PreTrainedConfig"):
    configuration_utils.PreTrainedConfig = configuration_utils.PretrainedConfig

if device == "cpu":
    from triton.runtime.autotuner import Autotuner

    def run_first_config(self, *args, **kwargs):
        config = self.configs[0]
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    Autotuner.run = run_first_config

import fla.layers.log_linear_mamba2 as fla_log_linear  # noqa: E402
from fla.models.gated_deltanet import (  # noqa: E402
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
)
from fla.models.log_linear_mamba2 import (  # noqa: E402
    LogLinearMamba2Config,
    LogLinearMamba2ForCausalLM,
)
from fla.models.mamba2 import Mamba2Config, Mamba2ForCausalLM  # noqa: E402

from models.import_model import import_model  # noqa: E402
from models.weights import load_model  # noqa: E402

if device == "cpu":
    from fla.ops.log_linear_attn.naive import naive_log_linear_attn

    def dense(q, k, v, g, level_scales, scale, **state):
        return naive_log_linear_attn(q, k, v, g, level_scales, scale), None

    def forward_anywhere(self, hidden_states, attention_mask=None, past_key_values=None, **rest):
        return self.cuda_kernels_forward(hidden_states)[0], None, past_key_values

    fla_log_linear.chunk_log_linear_attn = dense
    fla_log_linear.LogLinearMamba2.forward = forward_anywhere

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
MODELS = (
    (Mamba2ForCausalLM, Mamba2Config(**SIZES, head_dim=32, state_size=64)),
    (
        Mamba2ForCausalLM,
        Mamba2Config(**SIZES, head_dim=64, state_size=32, tie_word_embeddings=True),
    ),
    (GatedDeltaNetForCausalLM, GatedDeltaNetConfig(**SIZES, head_dim=32, num_heads=3)),
    (LogLinearMamba2ForCausalLM, LogLinearMamba2Config(**SIZES, head_dim=32, state_size=64)),
)


def shake(model: nn.Module) -> None:
    """Random values everywhere, so that a tensor in the wrong place shows."""
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        short = name.split(".")[-1]
        if short == "A_log":
            value = 0.5 * noise
        elif short == "dt_bias":
            value = noise - 2
        elif short in ("L", "D") or "norm" in name:
            value = 1 + 0.3 * noise
        elif "conv1d" in name:
            value = 0.4 * noise
        else:
            value = 0.15 * noise
        with torch.no_grad():
            parameter.copy_(value)


def main() -> int:
    # Products in fp32 are TF32 inside FLA's kernels on a GPU.
    tolerance = 1e-4 if device == "cpu" else 2e-2
    tokens = torch.randint(96, (2, T), generator=torch.Generator().manual_seed(1)).to(device)
    bad = 0
    for number, (kind, config) in enumerate(MODELS):
        theirs = kind(config).eval()
        shake(theirs)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(f"{folder}/fla", safe_serialization=number != 2)
            import_model(f"{folder}/fla", f"{folder}/ours", "fla")
            ours = load_model(f"{folder}/ours", device)
        with torch.no_grad():
            wanted = theirs.to(device)(tokens).logits.float()
            found = ours(tokens)
        difference = float((found - wanted).abs().max())
        largest = float(wanted.abs().max())
        fits = difference <= tolerance * max(1.0, largest)
        bad += not fits
        print(
            f"{'ok ' if fits else 'BAD'} {kind.__name__}: {T} tokens, largest logit {largest:.3f}, "
            f"difference {difference:.2e}",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
