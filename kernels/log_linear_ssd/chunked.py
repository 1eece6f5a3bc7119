"""Log-linear SSD by chunks, in plain torch and differentiable by autograd: O(T log T).

Five steps, all batched over chunks: inside the chunk; what the past left inside a first chunk;
one state per chunk; the tree of states, level by level, read as soon as a level is ready; the
state after the last token. Trains on a CPU and is the gradient oracle of the Triton kernels.
"""

import torch
from torch import Tensor

from kernels.chunk_plan import ChunkPlan, chunk_plan
from kernels.chunk_tiles import decay_tile, level_tile, sum_to_end
from kernels.levels import carry
from kernels.state import FenwickState


def log_linear_ssd_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    lengths: tuple[int, ...],
    initial_state: FenwickState | None,
    return_final_state: bool,
    max_C: int = 64,
) -> tuple[Tensor, FenwickState | None]:
    """Equal to `log_linear_ssd_recurrence` for documents of `lengths` laid end to end.

    Args:
        q, k: [B, T, G, K];  v: [B, T, H, V];  log_decay: [B, T, H];  level_weights: [B, T, H, L].
        lengths: the N documents, B * T tokens in all.
        initial_state: levels [N, H, L, K, V] or None for zero.
        max_C: longest chunk, a power of two; changes speed, not the result.

    Returns:
        o [B, T, H, V] in fp32 (fp64 where v is fp64) and the final state if asked for.
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    B, _, H, V = v.shape
    G, K = k.shape[2:]
    L = level_weights.shape[-1]
    positions = tuple(initial_state.position.tolist()) if initial_state else (0,) * len(lengths)
    plan = chunk_plan(lengths, positions, max_C, v.device)
    m = plan.m
    q = plan.to_chunks(q.to(dtype)).transpose(1, 2)  # [N, G, C, K]
    k = plan.to_chunks(k.to(dtype)).transpose(1, 2)
    v = plan.to_chunks(v.to(dtype))  # [N, C, H, V]
    weights = plan.to_chunks(level_weights.to(dtype))  # [N, C, H, L]
    g = plan.to_chunks(log_decay.double())  # [N, C, H]
    total = g.cumsum(1)  # from the chunk's start

    # 1. Inside the chunk: Q K^T once for a group, weighted for each head.
    tile = decay_tile(total.transpose(1, 2)).to(dtype)  # [N, H, C, C]
    tile = tile * level_tile(weights[..., : m + 1].transpose(1, 2))
    scores = q @ k.transpose(-1, -2)  # [N, G, C, C]
    tile = tile.unflatten(1, (G, H // G)) * scores[:, :, None]
    o = tile.flatten(1, 2) @ v.transpose(1, 2)  # [N, H, C, V]
    o = o.transpose(1, 2).contiguous()  # [N, C, H, V]

    def read(chunks: Tensor, states: Tensor, read_weights: Tensor) -> None:
        """o[chunks] += read_weights [R, C, H] * q^T states, states [R, G, K, (H/G) V]."""
        values = (q[chunks] @ states).unflatten(-1, (H // G, V))  # [R, G, C, H/G, V]
        values = values.transpose(1, 2).flatten(2, 3)  # [R, C, H, V]
        o.index_add_(0, chunks, values * read_weights[..., None])

    def scale(states: Tensor, log_factor: Tensor) -> Tensor:
        """exp(log_factor [R, H]) * states [R, G, K, (H/G) V]."""
        factor = log_factor.exp().to(dtype).unflatten(-1, (G, 1, H // G))
        return (states.unflatten(-1, (H // G, V)) * factor[..., None]).flatten(-2)

    # 2. Blocks of the initial state that end inside a document's first chunk.
    decay = total.exp().to(dtype)  # [N, C, H], from the chunk's start to each slot
    past = _past_blocks(initial_state, G, dtype)  # [documents, L, G, K, (H/G) V]
    inherited = v.new_zeros(len(lengths), G, K, H // G * V)
    for part in plan.partial:
        assert past is not None  # else there is no position to lie inside a chunk
        chunks, block = plan.first_chunk[part.documents], past[part.documents, part.level]
        slot_levels = part.levels[:, :, None, None].expand(-1, -1, H, 1)
        block_weights = weights[chunks].gather(-1, slot_levels)[..., 0]  # [P, C, H]
        read(chunks, block, block_weights * decay[chunks])
        inherited = inherited.index_add(0, part.documents, block)

    # 3. One state per chunk, decayed to its end. V carries the decay, since k has no head.
    chunk_total = total[:, -1]  # [N, H]
    v_decayed = v * sum_to_end(g, 1).exp().to(dtype)[..., None]
    v_decayed = v_decayed.unflatten(2, (G, H // G)).transpose(1, 2).flatten(3)  # [N, G, C, ...]
    nodes = k.transpose(-1, -2) @ v_decayed  # [N, G, K, (H/G) V]
    if plan.partial:
        nodes = nodes.index_add(
            0, plan.first_chunk, scale(inherited, chunk_total[plan.first_chunk])
        )
    nodes, node_total = nodes[plan.leaves], chunk_total[plan.leaves]

    # 4. The tree. `nearer` sums the totals of the blocks between a node's end and its reader:
    #    a sum of segments, never a difference of two long sums.
    nearer = torch.zeros_like(chunk_total)
    far_states: list[tuple[Tensor, int, Tensor]] = []  # documents, level, state
    for j, tree in enumerate(plan.tree):
        if past is not None and len(tree.past_documents):
            nodes = torch.cat([nodes, past[tree.past_documents, m + 1 + j]])
            node_total = torch.cat([node_total, node_total.new_zeros(len(tree.past_documents), H)])
        if len(tree.readers):
            read_states, before = nodes[tree.read_node], nearer[tree.readers]
            read_decay = (before[:, None] + total[tree.readers]).exp().to(dtype)
            read(tree.readers, read_states, weights[tree.readers, :, :, m + 1 + j] * read_decay)
            if return_final_state and len(tree.last_readers):
                to_end = (before + chunk_total[tree.readers])[tree.last_readers]
                state = scale(read_states[tree.last_readers], to_end)
                far_states.append((tree.last_documents, m + 1 + j, state))
            nearer = nearer.index_add(0, tree.readers, node_total[tree.read_node])
        right_total = node_total[tree.right]
        nodes = scale(nodes[tree.left], right_total) + nodes[tree.right]
        node_total = node_total[tree.left] + right_total

    o = plan.from_chunks(o, B)
    if not return_final_state:
        return o, None

    # 5. The state after the last token: the last chunk by level, the past, the tree's nodes.
    last = plan.last_chunk
    in_chunk = _by_level(plan, k[last], v_decayed[last], m)  # [documents, m+1, G, K, (H/G) V]
    levels = in_chunk.new_zeros(len(lengths), L, G, K, H // G * V)
    levels[:, : m + 1] = in_chunk
    for part in plan.partial:
        assert past is not None
        still = part.last_levels >= 0
        documents, target = part.documents[still], part.last_levels[still]
        state = scale(past[documents, part.level], chunk_total[last[documents]])
        levels = levels.index_put((documents, target), state, accumulate=True)
    for documents, far_level, state in far_states:
        target = torch.full_like(documents, far_level)
        levels = levels.index_put((documents, target), state)
    levels = levels.unflatten(-1, (H // G, V)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    position = torch.tensor(positions) + torch.tensor(lengths)
    return o, FenwickState(levels.contiguous(), position)


def _past_blocks(state: FenwickState | None, G: int, dtype: torch.dtype) -> Tensor | None:
    """[N, H, L, K, V] after the carry for the next token -> [N, L, G, K, (H/G) V]."""
    if state is None:
        return None
    levels = carry(state.levels.to(dtype), state.position)
    levels = levels.unflatten(1, (G, -1))  # [N, G, H/G, L, K, V]
    return levels.permute(0, 3, 1, 4, 2, 5).flatten(-2)


def _by_level(plan: ChunkPlan, k: Tensor, v_decayed: Tensor, m: int) -> Tensor:
    """sum over the slots of one chunk that the last token sees at level l, for l = 0..m."""
    l = torch.arange(m + 1, device=k.device)
    chosen = plan.last_slot_levels[:, None] == l[None, :, None]  # [documents, m+1, C]
    chosen = chosen.to(k.dtype)
    return torch.einsum("nlc,ngck,ngcv->nlgkv", chosen, k, v_decayed)
