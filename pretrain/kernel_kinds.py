"""Where a device's time goes, by kind of kernel: names of kernels are all that a profiler knows."""

import re
from collections.abc import Iterable
from typing import Any

KINDS = (
    ("communication", r"nccl|allreduce|all_reduce|allgather|c10d|gloo"),
    ("optimizer", r"adam|multi_tensor|_foreach|muon|lerp"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|attention"),
    ("cross-entropy", r"logsumexp|log_softmax|cross_entropy|nll|scatter_add"),
    ("short convolution", r"conv"),
    ("norm", r"norm"),
    ("SwiGLU", r"swiglu|silu"),
    # Not "lambda": C++ has the word in the names of half of torch's kernels.
    ("lambda", r"level_weights|level_softplus"),
    ("matrix product", r"gemm|cutlass|cublas|nvjet|xmma|::mm|addmm|bmm|matmul|sgemm|mkldnn_linear"),
    (
        "operator",
        r"^(prepare|leaf|up|out|inside|across|query|node|split|down|key_value|key_query|gates)"
        r"(_\w+)?_kernel|^pair_\w+_kernel|log_linear|delta|chunk|ssd|scan|recompute_w_u|solve_tril|l2norm|_wy_",
    ),
    ("copy", r"memcpy|copy|memset|fill|cat|::to|clone|zero_|slice|transpose|contiguous"),
)
"""First match wins; what matches none is elementwise work."""
ELEMENTWISE = "elementwise and sums"
LARGEST = 20


def kind_of(name: str) -> str:
    """The kind of a kernel of this name."""
    for kind, pattern in KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return ELEMENTWISE


def seconds_by_kind(
    averages: Iterable[Any], device_type: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Device seconds by kind, and of the largest kernels by name; both the largest first.

    Args:
        averages: of torch.profiler's key_averages().
    """
    of_kernel: dict[str, float] = {}
    for event in averages:
        on_gpu = device_type == "cuda"
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micros > 0:
            of_kernel[event.key] = of_kernel.get(event.key, 0.0) + micros / 1e6
    of_kind: dict[str, float] = {}
    for name, seconds in of_kernel.items():
        of_kind[kind_of(name)] = of_kind.get(kind_of(name), 0.0) + seconds
    return _largest(of_kind), dict(list(_largest(of_kernel).items())[:LARGEST])


def _largest(seconds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))
