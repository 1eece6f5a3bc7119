"""The index arithmetic of the Fenwick tree; the only place where it is written down.

Seen from token t, token s <= t lives at level (t XOR s).bit_length(): level 0 is t itself, level
l >= 1 is the aligned block of 2**(l-1) tokens that starts at (t >> l) << l and exists where bit
l-1 of t is set. So the past of t is cut into one block for each set bit of t, nearest block
smallest, and the state of a row of T tokens has (T-1).bit_length() + 1 levels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def num_levels(T: int) -> int:
    """Levels needed by a row of T >= 1 tokens: (T - 1).bit_length() + 1."""
    if T < 1:
        raise ValueError(f"a row needs at least one token: got T={T}")
    return (T - 1).bit_length() + 1


def level(t: int, s: int) -> int:
    """Level at which token t sees token s, 0 <= s <= t: (t XOR s).bit_length()."""
    if not 0 <= s <= t:
        raise ValueError(f"level(t, s) needs 0 <= s <= t: got t={t}, s={s}")
    return (t ^ s).bit_length()


def bit_length(x: Tensor) -> Tensor:
    """Elementwise int.bit_length of a non-negative int64 tensor with entries below 2**53."""
    return torch.frexp(x.double()).exponent.to(torch.int64)


def level_matrix(T: int, device: torch.device | str | None = None) -> Tensor:
    """[T, T] int64: entry [t, s] is level(t, s) for s <= t. Entries above the diagonal are to be
    masked by the caller (they hold the level of the mirrored pair)."""
    t = torch.arange(T, device=device)
    return bit_length(t[:, None] ^ t[None, :])


def carry(levels: Tensor, position: Tensor) -> Tensor:
    """The binary counter's carry that precedes the token at `position`.

        t = 0:  nothing
        t > 0:  l = lowest set bit of t, plus 1;  S[l] += S[0..l-1];  clear S[0..l-1]

    Args:
        levels: [B, H, L, K, V] states of every level after token t - 1.
        position: [B] int64, t for every batch row, each below 2**(L-1); on any device. On that of
            `levels` nothing is copied between host and device and the kernels are the same for
            every t, so the carry can be part of a CUDA graph.

    Returns:
        [B, H, L, K, V]; the argument is left as it is.
    """
    on_cpu = position.device.type == "cpu" and levels.device.type == "cpu"
    if on_cpu and not levels.requires_grad:
        return _carry_by_rows(levels, position)
    return _carry_by_masks(levels, position.to(levels.device))


def _carry_by_masks(levels: Tensor, t: Tensor) -> Tensor:
    """The same kernels for every t, and no number that comes back to the host."""
    L = levels.shape[2]
    slot = torch.arange(L, device=levels.device)
    target = torch.where(t > 0, bit_length(t & -t), 0)  # lowest set bit, plus 1; 0 = no carry
    target = target[:, None]
    merged_away = (slot < target)[:, None, :, None, None]
    receives = ((slot == target) & (target > 0))[:, None, :, None, None]
    merged = torch.where(merged_away, levels, 0).sum(2, keepdim=True)
    return torch.where(merged_away, 0, levels) + torch.where(receives, merged, 0)


def _carry_by_rows(levels: Tensor, position: Tensor) -> Tensor:
    """Moves only what is merged, but asks for the positions and writes in place, which autograd
    would have to take back token by token at great cost."""
    targets = [(t & -t).bit_length() for t in position.tolist()]
    carried = levels.clone()
    for target in set(targets) - {0}:
        chosen = [row for row, of_row in enumerate(targets) if of_row == target]
        # All rows at once without an index where they agree, as in a batch read together.
        rows = slice(None) if len(chosen) == len(targets) else torch.tensor(chosen)
        carried[rows, :, target] = levels[rows, :, : target + 1].sum(2)
        carried[rows, :, :target] = 0
    return carried


def blocks(position: int) -> Iterator[tuple[int, int]]:
    """(level, first token) of the blocks that the token at `position` sees before itself."""
    for i in range(position.bit_length()):
        if position >> i & 1:
            yield i + 1, (position >> (i + 1)) << (i + 1)
