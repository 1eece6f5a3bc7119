"""Recall beyond the trained length: trains at 128 tokens, scores at 128 and 512. See context.md.

PYTHONPATH=. python docs/context_experiment.py KIND SEED [STEPS]    about 90 s a model on one core

A row holds four key-value pairs in its first half and, in the second, queries: a key, at which the
model has to name the value. All else is one filler token.
"""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.extend_context import Rule, extend_parameters, extended_config
from models.initialize import initialize
from models.language_model import LanguageModel
from models.parameter_groups import decays

SHORT, LONG, KEYS, PAIRS, BATCH = 128, 512, 32, 4, 16
PEAK_LR = 3e-3


def rows(B: int, T: int, queries: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, labels (-100: none) and distance from query to pair, all [B, T]."""
    tokens = torch.zeros(B, T, dtype=torch.int64)
    labels, distance = torch.full((B, T), -100), torch.zeros(B, T, dtype=torch.int64)
    for r in range(B):
        keys = torch.randperm(KEYS, generator=random)[:PAIRS] + 1
        values = torch.randint(KEYS, (PAIRS,), generator=random) + 1 + KEYS
        at = torch.randperm(T // 4 - 1, generator=random)[:PAIRS].sort().values * 2
        tokens[r, at], tokens[r, at + 1] = keys, values
        query = torch.randperm(T // 4, generator=random)[:queries] * 2 + T // 2
        which = torch.randint(PAIRS, (queries,), generator=random)
        tokens[r, query], labels[r, query] = keys[which], values[which]
        distance[r, query] = query - at[which]
    return tokens, labels, distance


def config(kind: str, max_seq_len: int, **level_weights: Any) -> ModelConfig:
    settings = {
        "vocab_size": 1 + 2 * KEYS,
        "d_model": 64,
        "num_layers": 2,
        "mixer": "log_linear_mamba2",
        "max_seq_len": max_seq_len,
        "tie_embeddings": True,
        "init_std": 0.05,
        "mlp": {"hidden_size": 128},
        "mamba2": {"head_size": 32, "state_size": 16},
        "level_weights": {"kind": kind, **level_weights},
    }
    return ModelConfig.model_validate(settings)


def trained(model_config: ModelConfig, seed: int, steps: int) -> LanguageModel:
    model = LanguageModel(model_config)
    initialize(model, seed)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n)], "weight_decay": 0.1},
        {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1, (step + 1) / 50, (steps - step) / (0.3 * steps))
        length = (SHORT // 4, SHORT // 2, SHORT)[step % 3] if step < steps // 3 else SHORT
        tokens, labels, _ = rows(BATCH, length, max(4, length // 8), random)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def extended(model: LanguageModel, rule: Rule) -> LanguageModel:
    longer = LanguageModel(extended_config(model.config, LONG, rule))
    parameters = extend_parameters(model.state_dict(), model.config, longer.config, rule)
    longer.load_state_dict(parameters)
    return longer.eval()


@torch.no_grad()
def score(model: LanguageModel) -> dict[str, float]:
    """Share of queries answered right."""
    result = {}
    for T, queries, seed in ((SHORT, 16, 98), (LONG, 32, 99)):
        tokens, labels, distance = rows(200, T, queries, torch.Generator().manual_seed(seed))
        asked = labels >= 0
        right = torch.cat([model(part).argmax(-1) for part in tokens.split(20)]) == labels
        result[f"at {T}"] = right[asked].float().mean().item()
        if T == LONG:
            far = asked & (distance >= LONG // 2)
            result[f"at {T}, distance >= {LONG // 2}"] = right[far].float().mean().item()
    return {name: round(value, 3) for name, value in result.items()}


def main(kind: str, seed: int, steps: int) -> None:
    def show(name: str, model: LanguageModel) -> None:
        print(json.dumps({"kind": kind, "seed": seed, "model": name, **score(model)}), flush=True)

    untied = trained(config(kind, SHORT), seed, steps)
    rules: tuple[Rule, ...] = ("copy", "decay", "one", "tie")
    for rule in rules:
        if (kind, rule) != ("linear", "decay"):
            show(f"untied, extended by {rule}", extended(untied, rule))
    show("levels for 512 tokens from the start", trained(config(kind, LONG), seed, steps))
    tied = trained(config(kind, SHORT, tied_above=5), seed, steps)
    show("tied above level 5", extended(tied, "copy"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1500)
