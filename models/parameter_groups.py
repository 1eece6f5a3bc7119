"""The class of every parameter, by name: does weight decay act on it, must it stay fp32.

    matrices (projections, embedding, lm_head, convolutions)    decayed
    norms, biases                                               not decayed
    A_log, dt_bias, D, level_weights.*                          not decayed; fp32 in storage and
                                                                in the optimizer
    *_proj.weight of the blocks                                 hidden matrices: what an optimizer
                                                                that orthogonalises may take
A name that fits no line is an error, so a new parameter cannot fall into a class by accident.
"""

import re

_DECAYED = re.compile(r"(.*\.)?(\w+_proj|embedding|lm_head|conv)\.weight")
_HIDDEN = re.compile(r"(.*\.)?\w+_proj\.weight")
_NOT_DECAYED = re.compile(r"(.*\.)?((\w+_)?norm\.weight|conv\.bias)")
_FP32 = re.compile(r"(.*\.)?(A_log|dt_bias|D|level_weights\.(a|W1|W2|b))")


def decays(name: str) -> bool:
    """Whether weight decay acts on the parameter of this name.

    Raises:
        ValueError: unknown name.
    """
    return _matched(name) is _DECAYED


def is_fp32(name: str) -> bool:
    """Whether the parameter of this name stays fp32 whatever the precision of the run.

    Raises:
        ValueError: unknown name.
    """
    return _matched(name) is _FP32


def is_hidden_matrix(name: str) -> bool:
    """Whether the parameter of this name maps hidden states to hidden states by a matrix.

    Raises:
        ValueError: unknown name.
    """
    return _matched(name) is _DECAYED and _HIDDEN.fullmatch(name) is not None


def layer_group(name: str) -> str:
    """The part of the model that a parameter belongs to, for gradient norms: `embedding`,
    `lm_head`, `norm`, or `blocks.0.mixer`, `blocks.0.mlp`, `blocks.0.lambda` of each block.
    """
    block = re.match(r"blocks\.\d+\.", name)
    if block is None:
        return name.partition(".")[0]
    if ".level_proj." in name or ".level_weights." in name:
        return f"{block[0]}lambda"
    part = name[block.end() :].partition(".")[0].removesuffix("_norm")
    return block[0] + part


def _matched(name: str) -> re.Pattern[str]:
    for pattern in (_FP32, _NOT_DECAYED, _DECAYED):
        if pattern.fullmatch(name):
            return pattern
    raise ValueError(
        f"parameter {name} belongs to no group: give it a line in models/parameter_groups.py"
    )
