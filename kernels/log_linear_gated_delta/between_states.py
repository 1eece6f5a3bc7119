"""The gated delta rule's Triton kernels between two states: tokens by the kernels, states here.

The operator is linear in the state. With f_t the query of token t carried to the first new token p,
without decay, what the kernels return beside o, a block of the past that begins at s0 adds

    o_t += lambda_t[level(t, s0)] exp(g_p + ... + g_t) f_t^T block

whatever it is merged with meanwhile. The final state is made of chunks' transitions and states in
plain torch. Differentiated by autograd; gates are summed in fp64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.chunk_tiles import sum_to_end
from kernels.levels import bit_length, blocks, carry, level
from kernels.log_linear_gated_delta.pair_plan import PAIR_CHUNK
from kernels.state import FenwickState


def gated_delta_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    lengths: tuple[int, ...],
    initial_state: FenwickState | None,
    return_final_state: bool,
) -> tuple[Tensor, FenwickState | None]:
    """o [B, T, H, V] and the final state if asked for, of documents laid end to end.

    The kernels know chunks aligned to a document's position 0. A document that begins inside a
    chunk gets empty slots before it, up to the chunk's start.
    """
    from kernels.log_linear_gated_delta.triton_op import log_linear_gated_delta_triton

    B, T = v.shape[:2]
    positions = [0] * len(lengths) if initial_state is None else initial_state.position.tolist()
    before = [p % PAIR_CHUNK for p in positions]
    padded = [empty + length for empty, length in zip(before, lengths, strict=True)]
    cu_seqlens = torch.tensor([0, *padded]).cumsum(0)
    tokens = _tokens_of_slots(before, lengths, v.device) if any(before) else None

    def row(x: Tensor) -> Tensor:
        x = x.reshape(1, B * T, *x.shape[2:])
        if tokens is None:
            return x
        nothing = x.new_zeros(1, 1, *x.shape[2:])
        return torch.cat([x, nothing], dim=1).index_select(1, tokens)

    decay_row, weights_row = row(log_decay), row(level_weights)
    first = torch.tensor(positions) - torch.tensor(before) if any(positions) else None
    o, far = log_linear_gated_delta_triton(
        row(q), row(k), row(v), decay_row, row(beta), weights_row, cu_seqlens, first
    )
    if far is not None and initial_state is not None:
        past = _past_output(far, decay_row, weights_row, initial_state, padded, before)
        o = (o.float() + past).to(v.dtype)
    o = (o if tokens is None else o[:, tokens < B * T]).reshape(v.shape)
    state = None
    if return_final_state:
        L = level_weights.shape[3]
        state = _final_state(k, v, log_decay, beta, L, initial_state, lengths)
    return o, state


def _past_output(
    far: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    state: FenwickState,
    lengths: list[int],
    before: list[int],
) -> Tensor:
    """What `state` adds to o, [1, slots, H, V] fp32, for documents of `lengths` slots of which
    `before` are empty."""
    past = carry(state.levels.float(), state.position)  # [N, H, L, K, V]
    _, H, L, _, V = past.shape
    outputs, begin = [], 0
    for n, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        begin += length
        o = far.new_zeros(length, H, V)
        position = int(state.position[n])
        decay = log_decay[0, rows].double().cumsum(0).exp().float()  # [T, H]
        t = torch.arange(position, position + length, device=far.device) - before[n]
        for block_level, block_begin in blocks(position):
            seen_at = bit_length(t ^ block_begin).clamp(max=L - 1)
            index = seen_at[:, None, None].expand(-1, H, 1)
            weight = level_weights[0, rows].float().gather(2, index)[..., 0] * decay
            values = torch.einsum("thk,hkv->thv", far[0, rows], past[n, :, block_level])
            o = o + values * weight[..., None]
        outputs.append(o)
    return torch.cat(outputs)[None]


def _final_state(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    L: int,
    initial_state: FenwickState | None,
    lengths: tuple[int, ...],
) -> FenwickState:
    """The state after each document: levels [N, H, L, K, V] fp32."""
    H = v.shape[2]
    k = k.repeat_interleave(H // k.shape[2], dim=2)
    k, v, log_decay, beta = (x.flatten(0, 1).transpose(0, 1) for x in (k, v, log_decay, beta))
    positions = torch.zeros(len(lengths), dtype=torch.int64)
    past = None
    if initial_state is not None:
        positions = initial_state.position
        past = carry(initial_state.levels.float(), positions)
    states, begin = [], 0
    for n, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        state = _document_state(
            k[:, rows], v[:, rows], log_decay[:, rows], beta[:, rows], L, int(positions[n]),
            None if past is None else past[n],
        )  # fmt: skip
        states.append(state)
        begin += length
    return FenwickState(torch.stack(states), positions + torch.tensor(lengths))


def _document_state(
    k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, L: int, first: int, past: Tensor | None
) -> Tensor:
    """[H, L, K, V]: k [H, T, K], v [H, T, V], the others [H, T]; past [H, L, K, V] or None."""
    C = PAIR_CHUNK
    empty, last = first % C, first + k.shape[1] - 1
    after = -(last + 1) % C

    def chunked(x: Tensor) -> Tensor:
        padding = (0, 0, empty, after) if x.dim() == 3 else (empty, after)
        return F.pad(x, padding).unflatten(1, (-1, C))

    k, v, beta = chunked(k.float()), chunked(v.float()), chunked(beta.float())[..., None]
    g = chunked(log_decay.double())
    overlap = (beta * (k @ k.transpose(-1, -2))).tril(-1)
    eye = torch.eye(C, device=k.device)
    moved = torch.linalg.solve_triangular(  # k^T R: keys at their chunk's end
        (overlap + eye).transpose(-1, -2), k, upper=True, unitriangular=True
    ).transpose(-1, -2)
    inserted = sum_to_end(g, -1).exp().float()[..., None] * beta * v
    erased = torch.eye(k.shape[-1], device=k.device) - moved @ (beta * k)
    transition = g.sum(-1).exp().float()[..., None, None] * erased  # [H, N, K, K]
    state = moved @ inserted  # [H, N, K, V]

    first_chunk, last_chunk = first // C, last // C
    by_level: list[Tensor | None] = [None] * L
    to_end = transition[:, -1]
    for seen_at, begin in [(0, last), *blocks(last)]:
        end = begin + (1 << max(seen_at - 1, 0))
        if end <= first:
            continue  # all of it is past
        if begin >= last_chunk * C:
            inside = slice(max(begin, first) - last_chunk * C, end - last_chunk * C)
            by_level[seen_at] = moved[:, -1, :, inside] @ inserted[:, -1, inside]
            continue
        chunks = slice(max(begin // C - first_chunk, 0), end // C - first_chunk)
        block_transition, block_state = _merged(transition[:, chunks], state[:, chunks])
        by_level[seen_at] = to_end @ block_state
        to_end = to_end @ block_transition
    if past is not None:
        for block_level, begin in blocks(first):
            seen_at = level(last, begin)
            block = to_end @ past[:, block_level]
            there = by_level[seen_at]
            by_level[seen_at] = block if there is None else there + block
    nothing = torch.zeros_like(state[:, 0])
    return torch.stack([nothing if x is None else x for x in by_level], dim=1)


def _merged(transition: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The pair of [H, n, K, K] and [H, n, K, V] together, neighbours two by two."""
    while (n := transition.shape[1]) > 1:
        pairs = n // 2 * 2
        left, right = slice(0, pairs, 2), slice(1, pairs, 2)
        state = torch.cat(
            [transition[:, right] @ state[:, left] + state[:, right], state[:, pairs:]], dim=1
        )
        transition = torch.cat(
            [transition[:, right] @ transition[:, left], transition[:, pairs:]], dim=1
        )
    return transition[:, 0], state[:, 0]


def _tokens_of_slots(before: list[int], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """For every slot its token, or the number of tokens where the slot is empty."""
    tokens, begin = [], 0
    for empty, length in zip(before, lengths, strict=True):
        tokens.append(torch.full((empty,), sum(lengths)))
        tokens.append(torch.arange(begin, begin + length))
        begin += length
    return torch.cat(tokens).to(device)
