"""What an initial state adds to the outputs, and the final state: plain torch around the kernels.

The operator is linear in the state, so the past is a sum of its own. A block of the past that
begins at token s0 is seen from token t at level(t, s0), whatever it is merged with meanwhile:

    o_t += lambda_t[level(t, s0)] exp(g_p + ... + g_t) q_t^T block      p the first new token

and the final state's level l is the sum over the tokens in the block that the last token sees at
l, decayed to the end. Gates are summed in fp64 and never subtracted. Differentiated by autograd.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.levels import bit_length, blocks, carry, level
from kernels.state import FenwickState


def past_output(
    q: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    state: FenwickState,
    lengths: tuple[int, ...],
) -> Tensor:
    """What `state` adds to o: [B, T, H, V] fp32.

    Args:
        q: [B, T, G, K];  log_decay: [B, T, H];  level_weights: [B, T, H, L].
        state: of the N documents of `lengths`, laid end to end in the B * T tokens.
    """
    H, V = state.levels.shape[1], state.levels.shape[4]
    past = carry(state.levels.float(), state.position)  # [N, H, L, K, V]
    q, log_decay, level_weights = (_flat(x) for x in (q, log_decay, level_weights))
    outputs = []
    for n, rows in _documents(lengths):
        o = q.new_zeros(lengths[n], H, V, dtype=torch.float32)
        position = int(state.position[n])
        decay = log_decay[rows].double().cumsum(0).exp().float()  # [T, H]
        for block_level, begin in blocks(position):
            t = torch.arange(position, position + lengths[n], device=q.device)
            seen_at = bit_length(t ^ begin)[:, None, None].expand(-1, H, 1)
            weight = level_weights[rows].float().gather(2, seen_at)[..., 0] * decay
            block = past[n, :, block_level].unflatten(0, (q.shape[1], -1))  # [G, H/G, K, V]
            values = torch.einsum("tgk,ghkv->tghv", q[rows].float(), block)
            o = o + values.flatten(1, 2) * weight[..., None]
        outputs.append(o)
    return torch.cat(outputs)


def final_state(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    L: int,
    initial_state: FenwickState | None,
    lengths: tuple[int, ...],
) -> FenwickState:
    """The state after each document: levels [N, H, L, K, V] fp32.

    Args:
        k: [B, T, G, K];  v: [B, T, H, V];  log_decay: [B, T, H].
    """
    k, v, log_decay = (_flat(x) for x in (k, v, log_decay))
    G = k.shape[1]
    positions = torch.zeros(len(lengths), dtype=torch.int64)
    past = None
    if initial_state is not None:
        positions = initial_state.position
        past = carry(initial_state.levels.float(), positions)
    states = []
    for n, rows in _documents(lengths):
        first = int(positions[n])
        last = first + lengths[n] - 1
        g = log_decay[rows].double()
        after = torch.cat([g[1:], torch.zeros_like(g[:1])]).flip(0).cumsum(0).flip(0)
        by_level: list[Tensor | None] = [None] * L
        for seen_at, begin in [(0, last), *blocks(last)]:
            size = 1 << max(seen_at - 1, 0)
            inside = slice(max(begin - first, 0), begin + size - first)
            if begin + size <= first:
                continue  # all of it is past
            weight = after[inside].exp().float()[..., None]
            values = (v[rows][inside].float() * weight).unflatten(1, (G, -1))
            block = torch.einsum("tgk,tghv->ghkv", k[rows][inside].float(), values)
            by_level[seen_at] = block.flatten(0, 1)
        if past is not None:
            to_end = g.sum(0).exp().float()[:, None, None]
            for block_level, begin in blocks(first):
                seen_at = level(last, begin)
                moved = past[n, :, block_level] * to_end
                there = by_level[seen_at]
                by_level[seen_at] = moved if there is None else there + moved
        empty = v.new_zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
        states.append(torch.stack([empty if x is None else x for x in by_level], dim=1))
    return FenwickState(torch.stack(states), positions + torch.tensor(lengths))


def _flat(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...]."""
    return x.flatten(0, 1)


def _documents(lengths: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    begin = 0
    for n, length in enumerate(lengths):
        yield n, slice(begin, begin + length)
        begin += length
