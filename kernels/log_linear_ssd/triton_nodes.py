"""The part of the backward pass that goes through the tree: query, node, split, down."""

import triton
import triton.language as tl

from kernels.log_linear_ssd.triton_tiles import chunk_row, load_keys, load_node, load_values
from kernels.triton_levels import bit_length, power_above


@triton.jit(do_not_specialize=["NC", "H", "G", "HG", "NL"])
def query_kernel(
    q_, do_, chunks, read_weights, dread_weights, nodes, node_total, dq_parts, read_mass,
    NC, H, G, HG, NL,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq += weight (do node^T) and dweight = q (do node^T), one flat loop over (head, node).

    read_mass [H, NL, chunks, 2]: sum of weight * dweight over a half's reads at chunk level j.
    """
    part = tl.program_id(0) % (G * HG)
    pid = tl.program_id(0) // (G * HG)
    n = (tl.num_programs(0) // (G * HG) - 1 - pid) // 2
    upper = pid % 2
    group = part // HG
    token, length, c, reads = chunk_row(chunks, n)
    NS = NC.to(tl.int64) * C
    r = tl.arange(0, 64)
    row = token + upper * 64
    ok = r + upper * 64 < length
    q = load_keys(q_, row, ok, group, G, 64, K, KP, DOT)
    dq = tl.zeros((64, KP), tl.float32)
    h = group * (H // G) + part % HG * HEADS
    e = c
    left = reads
    nearer = 0.0
    for _ in tl.range(0, HEADS * reads, num_stages=STAGES):
        low = e & (-e)
        at = h * NC.to(tl.int64) + n - c + e
        weights_at = (h * NL + bit_length(low)) * NS + n * C + upper * 64 + r
        weight = tl.load(read_weights + weights_at)
        decay = tl.exp(nearer)
        nearer += tl.load(node_total + at)
        seen = tl.zeros((64, KP), tl.float32)
        for vt in tl.static_range(V // BV):
            do = load_values(do_, row, ok, h, vt, H, 64, V, BV, DOT, TMA)
            node = load_node(nodes, at * KP, vt, V, KP, BV, DOT, TMA)
            seen = tl.dot(do, tl.trans(node), seen, input_precision=IP)
        dq += seen * (weight * decay)[:, None]
        dweight = tl.sum(seen * q.to(tl.float32), 1) * decay
        tl.store(dread_weights + weights_at, dweight)
        mass_at = ((h * NL + bit_length(low) - 1) * NC.to(tl.int64) + n) * 2 + upper
        tl.store(read_mass + mass_at, tl.sum(dweight * weight, 0))
        left -= 1
        last = left == 0
        e = tl.where(last, c, e - low)
        nearer = tl.where(last, 0.0, nearer)
        left = tl.where(last, reads, left)
        h += last.to(tl.int32)
    to = dq_parts + (part * NS + n * C + upper * 64 + r)[:, None] * KP
    tl.store(to + tl.arange(0, KP)[None, :], dq)


@triton.jit(do_not_specialize=["NC", "NS_G", "H", "G", "NL"])
def node_kernel(
    q_, do_, chunks, items, read_weights, chunk_total, dnodes, dnode_scales, dgroups, NC, NS_G, H,
    G, NL,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DOT: tl.constexpr, IP: tl.constexpr, TMA_Q: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """q^T (weight do) over an item's readers, by halves of a chunk. NS_G: slots of dgroups.

    Tiles of BV columns of dnodes are divided by a power of two, dnode_scales [H, chunks, tiles]:
    fp16 then has three bits more than bf16, with which dk without decay passes 3e-3 (measured).
    """
    h = tl.program_id(0) % H
    vt = tl.program_id(0) // H % (V // BV)
    item = tl.program_id(0) // (H * (V // BV))
    end = tl.load(items + item * 5)
    first = tl.load(items + item * 5 + 1)
    readers = tl.load(items + item * 5 + 2)
    level = tl.load(items + item * 5 + 3)
    target = tl.load(items + item * 5 + 4)
    token, _, _, _ = chunk_row(chunks, first)
    tokens = (readers - 1) * C + tl.load(chunks + (first + readers - 1) * 6 + 1)
    group = h // (H // G)
    totals = chunk_total + h * NC.to(tl.int64)
    x128 = tl.arange(0, 128)
    nearer = 0.0
    for x in range(end, first, 128):
        nearer += tl.sum(tl.load(totals + x + x128, mask=x + x128 < first, other=0.0), 0)
    weights_at = (h * NL + level) * (NC.to(tl.int64) * C) + first * C
    r = tl.arange(0, 64)
    dnode = tl.zeros((KP, BV), tl.float32)
    for i in tl.range(0, readers * (C // 64), num_stages=STAGES):
        ok = i * 64 + r < tokens
        row = token + i * 64
        if TMA_Q:
            q = q_.load([row.to(tl.int32), group * K]).to(DOT)
        else:
            q = load_keys(q_, row, ok, group, G, 64, K, KP, DOT)
        do = load_values(do_, row, ok, h, vt, H, 64, V, BV, tl.float32, TMA)
        weight = tl.load(read_weights + weights_at + i * 64 + r) * tl.exp(nearer)
        weighted = (do * weight[:, None]).to(DOT)
        dnode = tl.dot(tl.trans(q), weighted, dnode, input_precision=IP)
        if i % (C // 64) == C // 64 - 1:
            nearer += tl.load(totals + first + i // (C // 64))
    at = tl.arange(0, KP)[:, None] * V + vt * BV + tl.arange(0, BV)[None, :]
    if target < 0:
        node = h * NC.to(tl.int64) + end
        scale, one_over = power_above(tl.max(tl.max(tl.abs(dnode), 1), 0))
        tl.store(dnode_scales + node * (V // BV) + vt, scale)
        tl.store(dnodes + node * (KP * V) + at, (dnode * one_over).to(dnodes.dtype.element_ty))
    else:
        tl.store(dgroups + (h * NS_G.to(tl.int64) + target) * (KP * V) + at, dnode)


@triton.jit(do_not_specialize=["NS_G"])
def split_kernel(dgroups, splits, NS_G, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums a node's partial gradients, always in the same order."""
    own = tl.load(splits + tl.program_id(1) * 3)
    first = tl.load(splits + tl.program_id(1) * 3 + 1)
    parts = tl.load(splits + tl.program_id(1) * 3 + 2)
    base = tl.program_id(2).to(tl.int64) * NS_G
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.range(0, parts, num_stages=3):
        total += tl.load(dgroups + (base + first + part) * SIZE + x)
    tl.store(dgroups + (base + own) * SIZE + x, total)


@triton.jit
def _merge(dnodes, dnode_scales, nodes, chunk_total, merged, slot, i, size: tl.constexpr, begin,
           end, above, x, tile, TILES: tl.constexpr, SIZE: tl.constexpr, V: tl.constexpr,
           BV: tl.constexpr):  # fmt: skip
    """Undoes the merge of the `size` chunks from i with the next `size`, all of one group.

    above: gradient of the state at the end of both. Returns that at the end of the first; stores
    the mass that the merge carries over the second. slot: of the group's chunk 0.
    """
    e = i + size
    exists = (e > begin) & (e < end)
    total = 0.0
    for y in tl.static_range(size):
        total += tl.load(chunk_total + slot + e + y, mask=(e + y >= begin) & (e + y < end),
                         other=0.0)  # fmt: skip
    carried = above * tl.exp(total)
    inside = x < tl.where(exists, SIZE, 0)
    node = tl.load(nodes + (slot + e) * SIZE + x, mask=inside, other=0.0).to(tl.float32)
    tl.store(merged + (slot + e) * TILES + tile, tl.sum(carried * node, 0), mask=exists)
    dnode = tl.load(dnodes + (slot + e) * SIZE + x, mask=inside, other=0.0).to(tl.float32)
    if V == BV:
        scale = tl.load(dnode_scales + slot + e, mask=exists, other=0.0)
    else:
        scale = tl.load(dnode_scales + (slot + e) * (V // BV) + x % V // BV, mask=inside, other=0.0)
    return carried + dnode * scale


@triton.jit
def _store_state(dstate, slot, i, begin, end, value, x, SIZE: tl.constexpr):
    inside = x < tl.where((i >= begin) & (i < end), SIZE, 0)
    tl.store(dstate + (slot + i) * SIZE + x, value.to(dstate.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["NC", "NG", "NS_G"])
def down_kernel(
    dnodes, dnode_scales, dgroups, nodes, chunk_total, group_total, groups, dstate, merged, NC, NG,
    NS_G,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Gradient of the state at the end of every chunk of a group: the nodes that contain it.

    merged [H, chunks, tiles]: for a node, the mass that its merge with its right neighbour
    carries over that neighbour, to later readers.
    """
    TILES: tl.constexpr = SIZE // BLOCK
    tl.static_assert(GROUP == 8)
    tile = tl.program_id(0)
    gn = tl.program_id(1)
    h = tl.program_id(2).to(tl.int64)
    x = tile * BLOCK + tl.arange(0, BLOCK)
    x128 = tl.arange(0, 128)
    base = tl.load(groups + gn * 6)
    begin = tl.load(groups + gn * 6 + 1)
    end = tl.load(groups + gn * 6 + 2)
    g = tl.load(groups + gn * 6 + 3)
    first = tl.load(groups + gn * 6 + 4)
    last = tl.load(groups + gn * 6 + 5)
    totals = group_total + h * NG + gn - g  # of the document's groups
    slots = h * NS_G + gn - g

    # Nodes that contain the whole group, from the nearest end on.
    above = tl.zeros((BLOCK,), tl.float32)
    nearer = 0.0
    size = 1
    e = g + 1
    while e <= last:
        # e = the end of the smallest block not yet passed that contains g as a left child
        if (g & size) == 0:
            above += tl.exp(nearer) * tl.load(dgroups + (slots + e) * SIZE + x)
            stop = tl.minimum(e + size, last + 1)
            for y in range(e, stop, 128):
                nearer += tl.sum(tl.load(totals + y + x128, mask=y + x128 < stop, other=0.0), 0)
            e = e + size
        size = size * 2

    # Merges whose right neighbour ends with this group.
    passed = 0.0
    stop = g + 1
    size = 1
    while (size <= g) & ((g & (2 * size - 1)) == 2 * size - 1):
        e = g + 1 - size
        if e > first:
            for y in range(e, stop, 128):
                passed += tl.sum(tl.load(totals + y + x128, mask=y + x128 < stop, other=0.0), 0)
            stop = e
            n = h * NC + base - (g - e) * GROUP
            node = tl.load(nodes + n * SIZE + x).to(tl.float32)
            tl.store(merged + n * TILES + tile, tl.exp(passed) * tl.sum(above * node, 0))
        size = size * 2

    slot = h * NC + base
    d3 = _merge(dnodes, dnode_scales, nodes, chunk_total, merged, slot, 0, 4, begin, end, above, x,
                tile, TILES, SIZE, V, BV)  # fmt: skip
    for quad in tl.static_range(2):
        above_quad = d3 if quad == 0 else above
        i = 4 * quad
        d1 = _merge(dnodes, dnode_scales, nodes, chunk_total, merged, slot, i, 2, begin, end,
                    above_quad, x, tile, TILES, SIZE, V, BV)  # fmt: skip
        for pair in tl.static_range(2):
            above_pair = d1 if pair == 0 else above_quad
            j = i + 2 * pair
            d0 = _merge(dnodes, dnode_scales, nodes, chunk_total, merged, slot, j, 1, begin, end,
                        above_pair, x, tile, TILES, SIZE, V, BV)  # fmt: skip
            _store_state(dstate, slot, j, begin, end, d0, x, SIZE)
            _store_state(dstate, slot, j + 1, begin, end, above_pair, x, SIZE)
