"""The kernels of tree attention: parts of each prefix side by side, then their sum.

One program takes the rows of one key/value head (nodes times query heads) over one part of the
prefix; the last part goes on over the tail. The parts leave unnormalised sums and their softmax
statistics, which a second launch puts together. Without a second row block every key and value is
read once.
"""

import triton
import triton.language as tl

from headsmith.inference.kernels.plan import FIELDS
from headsmith.inference.kernels.tile_triton import LOG2E, dot, narrow, tanh

ENTRY = tl.constexpr(FIELDS)


@triton.jit
def _parts(prefix):
    """parts_of (plan.py) on the device: 1, 2, 4, 8, 16, 32."""
    many = 1 + (prefix >= 512).to(tl.int32) + 2 * (prefix >= 2048).to(tl.int32)
    many += 4 * (prefix >= 8192).to(tl.int32) + 8 * (prefix >= 32768).to(tl.int32)
    return many + 16 * (prefix >= 131072).to(tl.int32)


@triton.jit
def _attend(q, key_at, value_at, inside, seen, top, total, acc, scale, softcap, D, DV, CAPPED):
    """One tile of keys and values: key_at [BLOCK_D, BLOCK_N], value_at [BLOCK_N, BLOCK_DV]."""
    real = inside[None, :]
    if key_at.shape[0] != D:
        real = real & (tl.arange(0, key_at.shape[0]) < D)[:, None]
    keys = tl.load(key_at, mask=real, other=0.0)
    scores = dot(q, keys, tl.zeros([q.shape[0], keys.shape[1]], tl.float32)) * scale
    if CAPPED:
        scores = softcap * tanh(scores / softcap)
    scores = tl.where(seen, scores * LOG2E, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet keeps its empty sum.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    real = inside[:, None]
    if value_at.shape[1] != DV:
        real = real & (tl.arange(0, value_at.shape[1]) < DV)[None, :]
    values = tl.load(value_at, mask=real, other=0.0)
    acc = dot(narrow(weights, values.dtype), values, acc * fade[:, None])
    return higher, total, acc


@triton.jit
def part_kernel(
    query,
    keys,
    values,
    sums,
    stats,
    requests,
    words,
    depths,
    query_head,
    query_row,
    key_slot,
    key_head,
    value_slot,
    value_head,
    tokens,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    first = tl.program_id(0) % ROW_BLOCKS * BLOCK_M
    head = tl.program_id(1)
    part = tl.program_id(2)
    entry = requests + tl.program_id(0) // ROW_BLOCKS * ENTRY
    slot = tl.load(entry).to(tl.int64)
    start = tl.load(entry + 1)
    begin = tl.load(entry + 2)
    length = tl.load(entry + 3)
    tail = tl.load(entry + 4)
    deep = tl.load(entry + 5)
    causal = tl.load(entry + 6)
    # What lies further back than the window of the first node is seen by nobody.
    low = start * 0
    if WINDOWED:
        low = tl.maximum(start - window + 1, 0)
    parts = _parts(start - low)
    if (first >= length * GROUP) | (part >= parts):
        return

    row = first + tl.arange(0, BLOCK_M)
    node = row // GROUP
    live = node < length
    token = (begin + node).to(tl.int64)
    query_heads = (head * GROUP + row % GROUP).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    out_dims = tl.arange(0, BLOCK_DV)
    query_at = query + (query_heads * query_head + token * query_row)[:, None] + dims[None, :]
    q = tl.load(query_at, mask=live[:, None] & (dims < D)[None, :], other=0.0)
    depth = tl.load(depths + deep + tail - length + node, mask=live, other=0)

    ahead = tl.arange(0, BLOCK_N)
    key_base = keys + slot * key_slot + head.to(tl.int64) * key_head
    value_base = values + slot * value_slot + head.to(tl.int64) * value_head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    size = tl.cdiv(tl.cdiv(start - low, parts), BLOCK_N) * BLOCK_N
    until = tl.minimum(low + (part + 1) * size, start)
    for j in range(low + part * size, until, BLOCK_N):
        column = j + ahead
        inside = column < until
        seen = inside[None, :]
        if WINDOWED:
            seen = seen & ((start + depth)[:, None] - column[None, :] < window)
        key_at = key_base + column[None, :] * D + dims[:, None]
        value_at = value_base + column[:, None] * DV + out_dims[None, :]
        top, total, acc = _attend(
            q, key_at, value_at, inside, seen, top, total, acc, scale, softcap, D, DV, CAPPED
        )

    last = tl.where(part == parts - 1, tail, 0)
    for j in range(0, last, BLOCK_N):
        column = j + ahead
        inside = column < tail
        word = tl.load(words + token * WORDS + j // 64, mask=live & (causal == 0), other=0)
        marked = (word[:, None] >> (column % 64).to(tl.int64)[None, :]) & 1
        earlier = column[None, :] <= (tail - length + node)[:, None]
        seen = inside[None, :] & ((marked != 0) | (earlier & (causal != 0)))
        if WINDOWED:
            their = tl.load(depths + deep + column, mask=inside, other=0)
            seen = seen & (depth[:, None] - their[None, :] < window)
        key_at = key_base + (start + column)[None, :] * D + dims[:, None]
        value_at = value_base + (start + column)[:, None] * DV + out_dims[None, :]
        top, total, acc = _attend(
            q, key_at, value_at, inside, seen, top, total, acc, scale, softcap, D, DV, CAPPED
        )

    at = (part * HEADS + query_heads) * tokens + token
    tl.store(stats + at * 2, top, mask=live)
    tl.store(stats + at * 2 + 1, total, mask=live)
    sums_at = sums + at[:, None] * DV + out_dims[None, :]
    tl.store(sums_at, acc, mask=live[:, None] & (out_dims < DV)[None, :])


@triton.jit
def sum_kernel(
    sums,
    stats,
    out,
    sinks,
    requests,
    owner,
    tokens,
    window,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MOST: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    prefix = tl.load(requests + tl.load(owner + token) * ENTRY + 1)
    if WINDOWED:
        prefix = tl.minimum(prefix, tl.maximum(window - 1, 0))
    part = tl.arange(0, MOST)
    there = part < _parts(prefix)
    at = (part * HEADS + head).to(tl.int64) * tokens + token
    top = tl.load(stats + at * 2, mask=there, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(top - highest)
    whole = tl.sum(total * weights, 0)
    if SINKS:
        whole += tl.exp2(sink - highest)
    dims = tl.arange(0, BLOCK_DV)
    real = dims < DV
    tile = tl.load(
        sums + at[:, None] * DV + dims[None, :], mask=there[:, None] & real[None, :], other=0.0
    )
    result = tl.sum(tile * weights[:, None], 0) / whole
    out_at = out + (token.to(tl.int64) * HEADS + head) * DV + dims
    tl.store(out_at, narrow(result, out.dtype.element_ty), mask=real)
