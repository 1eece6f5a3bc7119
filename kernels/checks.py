"""What every operator refuses, in one wording."""

import torch
from torch import Tensor

from kernels.levels import num_levels
from kernels.state import FenwickState

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_shape(name: str, x: Tensor, letters: str, expected: tuple[int, ...]) -> None:
    """ValueError unless x has the expected shape; `letters` names its dimensions: "B T H"."""
    if tuple(x.shape) != expected:
        wanted = ", ".join(f"{l}={n}" for l, n in zip(letters.split(), expected, strict=True))
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [{wanted}]")


def check_sequence(
    q: Tensor, k: Tensor, v: Tensor, per_head: dict[str, Tensor], level_weights: Tensor
) -> None:
    """Shapes, dtypes and devices of q, k [B,T,G,K], v [B,T,H,V], every `per_head` tensor [B,T,H]
    and level_weights [B,T,H,L]."""
    for name, x in {"q": q, "k": k, "v": v, "level_weights": level_weights}.items():
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected four dimensions")
    B, T, G, K = q.shape
    H = v.shape[2]
    if min(B, T, G, K, *v.shape[2:]) < 1:
        raise ValueError(f"empty input: q has shape {list(q.shape)}, v {list(v.shape)}")
    if H % G:
        raise ValueError(f"heads do not divide: H={H} value heads in G={G} key/query groups")
    check_shape("k", k, "B T G K", (B, T, G, K))
    check_shape("v", v, "B T H V", (B, T, H, v.shape[3]))
    check_shape("level_weights", level_weights, "B T H L", (B, T, H, level_weights.shape[3]))
    for name, x in per_head.items():
        check_shape(name, x, "B T H", (B, T, H))
    everything = {"k": k, "v": v, "level_weights": level_weights, **per_head}
    for name, x in everything.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; put them on one device")
    for name, x in {"q": q, **everything}.items():
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} is {x.dtype}; expected bf16, fp16, fp32 or fp64")


def document_lengths(B: int, T: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """Lengths of the N documents: B rows of T, or what cu_seqlens [N+1] cuts one row into."""
    if cu_seqlens is None:
        return (T,) * B
    if B != 1:
        raise ValueError(f"cu_seqlens needs one packed row: got B={B}; flatten the rows into one")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype.is_floating_point:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "expected [N+1] integers"
        )
    ends = cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
    if ends[0] != 0 or ends[-1] != T or min(lengths) < 1:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T={T} without an empty document: got {_short(ends)}"
        )
    return lengths


def check_levels(
    level_weights: Tensor, lengths: tuple[int, ...], state: FenwickState | None, K: int, V: int
) -> None:
    """ValueError where level_weights [B,T,H,L] has fewer levels than the longest row needs."""
    if state is not None:
        H, L = level_weights.shape[2:]
        state.check(len(lengths), H, L, K, V)
        if state.levels.device != level_weights.device:
            raise ValueError(
                f"the state is on {state.levels.device}, level_weights on "
                f"{level_weights.device}; put them on one device"
            )
    positions = state.position.tolist() if state is not None else [0] * len(lengths)
    check_level_count(level_weights, lengths, tuple(positions))


def check_level_count(
    level_weights: Tensor, lengths: tuple[int, ...], positions: tuple[int, ...]
) -> None:
    """ValueError where documents of these lengths from these positions on need more levels."""
    L = level_weights.shape[3]
    longest = max(p + n for p, n in zip(positions, lengths, strict=True))
    if num_levels(longest) > L:
        raise ValueError(
            f"too few levels: a row of {longest} tokens needs {num_levels(longest)} levels, "
            f"level_weights has {L}; give every token one weight for each level"
        )


def check_step(level_weights: Tensor, state: FenwickState, K: int, V: int) -> None:
    """`check_levels` for one more token of every row. Sizes only, where the position is on a
    device: to ask it would make the host wait."""
    if state.position.device.type == "cpu":
        check_levels(level_weights, (1,) * len(level_weights), state, K, V)
    else:
        B, _, H, L = level_weights.shape
        state.check(B, H, L, K, V)


def _short(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return f"[{shown}, ...]" if len(values) > 6 else f"[{shown}]"
