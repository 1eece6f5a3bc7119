"""Log-linear gated delta rule by chunks, in plain torch, differentiable by autograd: O(T log T).

Inside a chunk the product of the Householder-like factors I - beta k k^T has the WY form

    P_t ... P_1 = exp(g_1 + ... + g_t) (I - K^T R diag(beta) K)
    R           = (I + tril(diag(beta) K K^T, -1))^-1

Across chunks a node of the Fenwick tree holds the pair (transition M [K, K], state U [K, V]); two
neighbours compose to (M_r M_l, M_r U_l + U_r). A reader does not move the states to itself: it
carries its query through the transitions of the nearer nodes, q^T M, so that every level is one
batched product and nothing is sequential but the log2(T / C) levels.
"""

import torch
from torch import Tensor

from kernels.chunk_plan import ChunkPlan, chunk_plan
from kernels.chunk_tiles import decay_tile, level_tile, sum_to_end
from kernels.levels import carry
from kernels.state import FenwickState


def log_linear_gated_delta_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    lengths: tuple[int, ...],
    initial_state: FenwickState | None,
    return_final_state: bool,
    max_C: int = 64,
) -> tuple[Tensor, FenwickState | None]:
    """Equal to `log_linear_gated_delta_recurrence` for documents of `lengths` laid end to end.

    Args:
        q, k: [B, T, G, K];  v: [B, T, H, V];  log_decay, beta: [B, T, H].
        level_weights: [B, T, H, L].
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
    v = plan.to_chunks(v.to(dtype)).transpose(1, 2)  # [N, H, C, V]
    beta = plan.to_chunks(beta.to(dtype)).transpose(1, 2)[..., None]  # [N, H, C, 1]
    weights = plan.to_chunks(level_weights.to(dtype)).transpose(1, 2)  # [N, H, C, L]
    g = plan.to_chunks(log_decay.double()).transpose(1, 2)  # [N, H, C]
    total = g.cumsum(-1)  # from the chunk's start
    decay = total.exp().to(dtype)[..., None]  # [N, H, C, 1], from the chunk's start to each slot

    # 1. Inside the chunk. beta = 0 in empty slots, so they neither erase nor insert.
    overlap = (k @ k.transpose(-1, -2)).tril(-1).repeat_interleave(H // G, dim=1) * beta
    identity = torch.eye(plan.C, dtype=dtype, device=k.device)
    unmoved = torch.eye(K, dtype=dtype, device=k.device)
    wy = torch.linalg.solve_triangular(
        overlap, identity.expand_as(overlap), upper=False, unitriangular=True
    )  # [N, H, C, C], R above
    scores = (q @ k.transpose(-1, -2)).tril().repeat_interleave(H // G, dim=1)
    q, k = q.repeat_interleave(H // G, dim=1), k.repeat_interleave(H // G, dim=1)
    tile = decay_tile(total).to(dtype) * level_tile(weights[..., : m + 1])
    o = (scores @ wy * tile) @ (beta * v)  # [N, H, C, V]
    erased_keys = wy @ (beta * k)  # R diag(beta) K
    q_carried = decay * (q - scores @ erased_keys)  # q_t^T P_t ... P_1
    chunk_decay = decay[:, :, -1:]  # [N, H, 1, 1]
    transition = chunk_decay * (unmoved - k.transpose(-1, -2) @ erased_keys)  # M
    to_end = sum_to_end(g, -1).exp().to(dtype)[..., None]  # [N, H, C, 1]
    inserted = to_end * beta * v
    state = k.transpose(-1, -2) @ (wy @ inserted)  # U, [N, H, K, V]

    def read(chunks: Tensor, queries: Tensor, states: Tensor, read_weights: Tensor) -> None:
        """o[chunks] += read_weights [R, H, C] * queries [R, H, C, K] @ states [R, H, K, V]."""
        o.index_add_(0, chunks, read_weights[..., None] * (queries @ states))

    # 2. Blocks of the initial state that end inside a document's first chunk.
    past = None
    if initial_state is not None:
        past = carry(initial_state.levels.to(dtype), initial_state.position).transpose(1, 2)
        inherited = past.new_zeros(len(lengths), H, K, V)
        for part in plan.partial:
            chunks, block = plan.first_chunk[part.documents], past[part.documents, part.level]
            slot_levels = part.levels[:, None, :, None].expand(-1, H, -1, 1)
            block_weights = weights[chunks].gather(-1, slot_levels)[..., 0]  # [P, H, C]
            read(chunks, q_carried[chunks], block, block_weights)
            inherited = inherited.index_add(0, part.documents, block)
        state = state.index_add(0, plan.first_chunk, transition[plan.first_chunk] @ inherited)

    # 3. The tree. A block of the past is already valued at the first new token, so nothing
    #    farther has to be carried over it: its transition is the identity.
    node_state, node_transition = state[plan.leaves], transition[plan.leaves]
    to_last = transition[plan.last_chunk]  # [documents, H, K, K], from a node's end to the row's
    far_states: list[tuple[Tensor, int, Tensor]] = []  # documents, level, state
    for j, tree in enumerate(plan.tree):
        if past is not None and len(tree.past_documents):
            node_state = torch.cat([node_state, past[tree.past_documents, m + 1 + j]])
            identities = unmoved.expand(len(tree.past_documents), H, K, K)
            node_transition = torch.cat([node_transition, identities])
        if len(tree.readers):
            queries, read_transition = q_carried[tree.readers], node_transition[tree.read_node]
            read_state = node_state[tree.read_node]
            read(tree.readers, queries, read_state, weights[tree.readers, :, :, m + 1 + j])
            q_carried = q_carried.index_copy(0, tree.readers, queries @ read_transition)
            if return_final_state and len(tree.last_readers):
                documents, i = tree.last_documents, tree.last_readers
                far_states.append((documents, m + 1 + j, to_last[documents] @ read_state[i]))
                carried = to_last[documents] @ read_transition[i]
                to_last = to_last.index_copy(0, documents, carried)
        right_transition = node_transition[tree.right]
        node_state = right_transition @ node_state[tree.left] + node_state[tree.right]
        node_transition = right_transition @ node_transition[tree.left]

    o = plan.from_chunks(o.transpose(1, 2), B)
    if not return_final_state:
        return o, None

    # 4. The state after the last token: the last chunk by level, the past, the tree's nodes.
    last = plan.last_chunk
    in_chunk = _by_level(plan, k[last], wy[last], inserted[last])
    levels = in_chunk.new_zeros(len(lengths), L, H, K, V)
    levels[:, : m + 1] = in_chunk
    for part in plan.partial:
        assert past is not None  # else there is no position to lie inside a chunk
        still = part.last_levels >= 0
        documents, target = part.documents[still], part.last_levels[still]
        block = transition[last[documents]] @ past[documents, part.level]
        levels = levels.index_put((documents, target), block, accumulate=True)
    for documents, far_level, block in far_states:
        target = torch.full_like(documents, far_level)
        levels = levels.index_put((documents, target), block)
    position = torch.tensor(positions) + torch.tensor(lengths)
    return o, FenwickState(levels.transpose(1, 2).contiguous(), position)


def _by_level(plan: ChunkPlan, k: Tensor, wy: Tensor, inserted: Tensor) -> Tensor:
    """[documents, m+1, H, K, V]: what the tokens of one chunk leave, apart by the level at which
    the last token sees them: K^T R (mask_l * inserted)."""
    l = torch.arange(plan.m + 1, device=k.device)
    chosen = plan.last_slot_levels[:, None] == l[None, :, None]  # [documents, m+1, C]
    chosen = chosen.to(k.dtype)
    keys = k.transpose(-1, -2) @ wy  # [documents, H, K, C]
    return torch.einsum("nlc,nhkc,nhcv->nlhkv", chosen, keys, inserted)
