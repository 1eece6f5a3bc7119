"""Longer rows for a trained model: more levels, and what their weights start from.

max_seq_len fixes the number of levels. A longer one needs further rows in every lambda table; the
old ones stay, and are computed apart from the new (models/level_weights.py), so that rows of the
old length give the same logits bit for bit. p is the longest of the old levels; a new one, p + j,
starts by a rule:

    copy     lambda[p+j] = lambda[p]        as if all longer blocks were the longest known
    decay    lambda[p+j] = lambda[p] / 2^j  exactly for fixed, for adaptive where d_t = 0 (elsewhere
                                            with the content's share of p's logit); not for linear,
                                            which has no bias
    one      lambda[p+j] = 1                for fixed; 0.999 for adaptive, log 2 for linear: where
                                            training starts
    tie      as copy, and tied for good: no new parameters, and any length from then on

A model whose level_weights.tied_above is set has a trained weight for every length already; it and
mixers without levels get a new max_seq_len only.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from models.config import MAX_SEQ_LEN, ModelConfig
from models.initialize import FIXED_LAMBDA, LAMBDA_BIAS, parameter_random

Rule = Literal["copy", "decay", "one", "tie"]


def extended_config(config: ModelConfig, max_seq_len: int, rule: Rule = "copy") -> ModelConfig:
    """The configuration for rows of max_seq_len tokens.

    Raises:
        ValueError: max_seq_len is not larger than before or more than any model can have; softmax
            over the levels or a rule that the kind of lambda cannot have.
    """
    if max_seq_len <= config.max_seq_len:
        raise ValueError(
            f"max_seq_len must grow: got {max_seq_len}; expected more than the model's "
            f"{config.max_seq_len}"
        )
    if max_seq_len > MAX_SEQ_LEN:
        raise ValueError(f"max_seq_len must be at most {MAX_SEQ_LEN}: got {max_seq_len}")
    level_weights = config.level_weights
    if _weights_grow(config, max_seq_len):
        if level_weights.activation == "softmax":
            raise ValueError(
                "softmax over levels cannot be extended: new levels would take weight from old "
                "ones; train with level_weights.tied_above, or with activation softplus"
            )
        if rule == "decay" and level_weights.kind == "linear":
            raise ValueError(
                "rule decay needs a bias: got level_weights.kind linear, which has none; "
                "use rule copy, one or tie"
            )
        before = config.num_level_weights
        if rule == "tie" and before < 2:
            raise ValueError("rule tie needs two levels: the model has one; use another rule")
        if rule == "tie":
            changes: dict[str, object] = {"tied_above": before - 2}
        else:
            changes = {"grown_from": (*level_weights.grown_from, before)}
        level_weights = level_weights.model_copy(update=changes)
    fields = {**config.model_dump(), "max_seq_len": max_seq_len}
    return ModelConfig.model_validate({**fields, "level_weights": level_weights.model_dump()})


@torch.no_grad()
def extend_parameters(
    parameters: Mapping[str, Tensor], config: ModelConfig, extended: ModelConfig, rule: Rule
) -> dict[str, Tensor]:
    """The parameters of the extended model; all but the lambda tables are the same tensors.

    Args:
        parameters: of LanguageModel(config), by name.
        extended: from `extended_config` with the same rule.
    """
    W, W_new = config.num_level_weights, extended.num_level_weights
    grown = dict(parameters)
    if W_new == W:
        return grown
    tables = [name for name in parameters if ".level_weights." in name or ".level_proj." in name]
    for name in tables:
        table = parameters[name]
        if name.endswith("level_proj.weight"):
            grown[name] = _grown_projection(table, W, W_new, rule, extended)
        elif name.endswith(".a"):
            grown[name] = torch.cat([table, _new_a(table, W_new - W, rule, extended)], dim=1)
        elif name.endswith(".b"):
            grown[name] = torch.cat([table, _new_b(table, W_new - W, rule)])
        elif name.endswith(".W1"):
            # Hidden units of their own for the new weights, from a fresh start; the old ones do not
            # read the new numbers.
            W1 = torch.empty(extended.level_weights.hidden_factor * W_new, W_new)
            torch.nn.init.xavier_normal_(W1, generator=parameter_random(0, name))
            grown[name] = W1.to(table)
            grown[name][: table.shape[0], :W] = table
            grown[name][: table.shape[0], W:] = 0
        else:
            grown[name] = table.new_zeros(W_new, extended.level_weights.hidden_factor * W_new)
            grown[name][:W, : table.shape[1]] = table
            if rule != "one":
                grown[name][W:, : table.shape[1]] = table[-1]
    return grown


def _weights_grow(config: ModelConfig, max_seq_len: int) -> bool:
    """Whether some layer has lambda tables, and they get longer."""
    if not any(mixer.startswith("log_linear_") for mixer in config.layer_mixers):
        return False
    longer = config.model_copy(update={"max_seq_len": max_seq_len})
    return longer.num_level_weights > config.num_level_weights


def _grown_projection(
    weight: Tensor, W: int, W_new: int, rule: Rule, extended: ModelConfig
) -> Tensor:
    """[H * W, D] -> [H * W_new, D]: new rows are copies of the longest level's, or zero where
    lambda is to start from a constant by them alone."""
    rows = weight.unflatten(0, (-1, W))
    new = rows[:, -1:].repeat(1, W_new - W, 1)
    if rule == "one" and extended.level_weights.kind == "linear":
        new = torch.zeros_like(new)
    return torch.cat([rows, new], dim=1).flatten(0, 1)


def _new_a(a: Tensor, count: int, rule: Rule, extended: ModelConfig) -> Tensor:
    last = a[:, -1:].repeat(1, count)
    if rule == "copy":
        return last
    if rule == "decay":
        return _halved(last)
    return torch.full_like(last, 1.0 if extended.level_weights.kind == "linear" else FIXED_LAMBDA)


def _new_b(b: Tensor, count: int, rule: Rule) -> Tensor:
    last = b[-1:].repeat(count)
    if rule == "copy":
        return last
    return _halved(last) if rule == "decay" else torch.full_like(last, LAMBDA_BIAS)


def _halved(logits: Tensor) -> Tensor:
    """softplus^-1(softplus(logits[..., j-1]) / 2^j) for j = 1, 2, ... on the last axis."""
    j = torch.arange(1, logits.shape[-1] + 1, device=logits.device)
    weight = torch.nn.functional.softplus(logits.double()) / 2.0**j
    return torch.log(torch.expm1(weight)).to(logits)
