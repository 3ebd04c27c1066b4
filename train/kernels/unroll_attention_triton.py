"""The kernels of unroll attention: one forward, and in the backward one for the queries, one for
the keys and values of step 0, and one for the later keys and values of each row.

Every sum is made by one program in one order, so that a step can be repeated bit for bit. They are
launched in unroll_attention_launch.py.
"""

import triton
import triton.language as tl

from headsmith.inference.kernels.tile_triton import dot, narrow


@triton.jit
def _tile(base, index, live, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `index` of a matrix of SIZE columns: [rows, BLOCK_D], zeros where not live."""
    ahead = tl.arange(0, BLOCK_D)
    at = base + index.to(tl.int64)[:, None] * SIZE + ahead[None, :]
    return tl.load(at, mask=live[:, None] & (ahead < SIZE)[None, :], other=0.0)


@triton.jit
def _put(base, index, live, tile, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    ahead = tl.arange(0, BLOCK_D)
    at = base + index.to(tl.int64)[:, None] * SIZE + ahead[None, :]
    tl.store(at, narrow(tile, base.dtype.element_ty), mask=live[:, None] & (ahead < SIZE)[None, :])


@triton.jit
def _seen(row, start, column, later, window, WINDOW: tl.constexpr):
    """Which queries see which keys of step 0."""
    seen = (column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None])
    if WINDOW:
        seen = seen & (row[:, None] + later - column[None, :] < window)
    return seen


@triton.jit
def _reach(rows, starts, block, count, later, window, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr):
    """The keys that a block of queries sees: from its first document's start to its last row."""
    low = tl.load(starts + block * BLOCK_M)
    if WINDOW:
        low = tl.maximum(low, tl.load(rows + block * BLOCK_M) + later - window + 1)
    return low, tl.load(rows + tl.minimum(block * BLOCK_M + BLOCK_M, count) - 1) + 1


@triton.jit
def forward_kernel(
    query,
    keys,
    values,
    own_keys,
    own_values,
    rows,
    starts,
    out,
    lse,
    count,
    tokens,
    later,
    window,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = head // GROUP
    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = index < count
    row = tl.load(rows + index, mask=live, other=-1)
    start = tl.load(starts + index, mask=live, other=0)
    q = _tile(query + head * count * SIZE, index, live, SIZE, BLOCK_D)
    top = tl.full([BLOCK_M], -1e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, high = _reach(rows, starts, block, count, later, window, WINDOW, BLOCK_M)
    for c in range(low, high, BLOCK_N):
        column = c + tl.arange(0, BLOCK_N)
        real = column < tokens
        k = _tile(keys + group * tokens * SIZE, column, real, SIZE, BLOCK_D)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
        seen = _seen(row, start, column, later, window, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = _tile(values + group * tokens * SIZE, column, real, SIZE, BLOCK_D)
        acc = dot(narrow(weights, v.dtype), v, acc * shrink[:, None])
        top = higher
    for j in range(later):
        at = (j * HEADS + group) * count * SIZE
        k = _tile(own_keys + at, index, live, SIZE, BLOCK_D).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * k, 1) * scale
        higher = tl.maximum(top, score)
        weight, shrink = tl.exp(score - higher), tl.exp(top - higher)
        total = total * shrink + weight
        v = _tile(own_values + at, index, live, SIZE, BLOCK_D).to(tl.float32)
        acc = acc * shrink[:, None] + weight[:, None] * v
        top = higher
    # A row that does not live has seen nothing.
    total = tl.where(live, total, 1.0)
    _put(out + head * count * SIZE, index, live, acc / total[:, None], SIZE, BLOCK_D)
    tl.store(lse + head * count + index, top + tl.log(total), mask=live)


@triton.jit
def query_kernel(
    query,
    keys,
    values,
    own_keys,
    own_values,
    rows,
    starts,
    lse,
    delta,
    grad,
    by_query,
    count,
    tokens,
    later,
    window,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = head // GROUP
    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = index < count
    row = tl.load(rows + index, mask=live, other=-1)
    start = tl.load(starts + index, mask=live, other=0)
    q = _tile(query + head * count * SIZE, index, live, SIZE, BLOCK_D)
    do = _tile(grad + head * count * SIZE, index, live, SIZE, BLOCK_D)
    sums = tl.load(lse + head * count + index, mask=live, other=0.0)
    product = tl.load(delta + head * count + index, mask=live, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, high = _reach(rows, starts, block, count, later, window, WINDOW, BLOCK_M)
    for c in range(low, high, BLOCK_N):
        column = c + tl.arange(0, BLOCK_N)
        real = column < tokens
        k = _tile(keys + group * tokens * SIZE, column, real, SIZE, BLOCK_D)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
        seen = _seen(row, start, column, later, window, WINDOW)
        weights = tl.exp(tl.where(seen, scores - sums[:, None], float("-inf")))
        v = _tile(values + group * tokens * SIZE, column, real, SIZE, BLOCK_D)
        gains = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        slopes = weights * (gains - product[:, None]) * scale
        acc = dot(narrow(slopes, k.dtype), k, acc)
    for j in range(later):
        at = (j * HEADS + group) * count * SIZE
        k = _tile(own_keys + at, index, live, SIZE, BLOCK_D).to(tl.float32)
        weight = tl.exp(tl.sum(q.to(tl.float32) * k, 1) * scale - sums)
        v = _tile(own_values + at, index, live, SIZE, BLOCK_D).to(tl.float32)
        gain = tl.sum(do.to(tl.float32) * v, 1)
        acc += (weight * (gain - product) * scale)[:, None] * k
    _put(by_query + head * count * SIZE, index, live, acc, SIZE, BLOCK_D)


@triton.jit
def key_kernel(
    query,
    keys,
    values,
    rows,
    starts,
    firsts,
    lasts,
    lse,
    delta,
    grad,
    by_key,
    by_value,
    count,
    tokens,
    later,
    window,
    scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    real = column < tokens
    k = _tile(keys + group * tokens * SIZE, column, real, SIZE, BLOCK_D)
    v = _tile(values + group * tokens * SIZE, column, real, SIZE, BLOCK_D)
    for_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first, last = tl.load(firsts + block), tl.load(lasts + block)
    for member in range(GROUP):
        head = group * GROUP + member
        for a in range(first, last, BLOCK_M):
            index = a + tl.arange(0, BLOCK_M)
            live = index < last
            row = tl.load(rows + index, mask=live, other=-1)
            start = tl.load(starts + index, mask=live, other=0)
            q = _tile(query + head * count * SIZE, index, live, SIZE, BLOCK_D)
            do = _tile(grad + head * count * SIZE, index, live, SIZE, BLOCK_D)
            sums = tl.load(lse + head * count + index, mask=live, other=0.0)
            product = tl.load(delta + head * count + index, mask=live, other=0.0)
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
            seen = _seen(row, start, column, later, window, WINDOW)
            weights = tl.exp(tl.where(seen, scores - sums[:, None], float("-inf")))
            for_value = dot(tl.trans(narrow(weights, do.dtype)), do, for_value)
            gains = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            slopes = weights * (gains - product[:, None]) * scale
            for_key = dot(tl.trans(narrow(slopes, q.dtype)), q, for_key)
    _put(by_key + group * tokens * SIZE, column, real, for_key, SIZE, BLOCK_D)
    _put(by_value + group * tokens * SIZE, column, real, for_value, SIZE, BLOCK_D)


@triton.jit
def own_kernel(
    query,
    own_keys,
    own_values,
    lse,
    delta,
    grad,
    by_key,
    by_value,
    count,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = index < count
    at = (tl.program_id(2) * HEADS + group) * count * SIZE
    k = _tile(own_keys + at, index, live, SIZE, BLOCK_D).to(tl.float32)
    v = _tile(own_values + at, index, live, SIZE, BLOCK_D).to(tl.float32)
    for_key = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for_value = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = group * GROUP + member
        q = _tile(query + head * count * SIZE, index, live, SIZE, BLOCK_D).to(tl.float32)
        do = _tile(grad + head * count * SIZE, index, live, SIZE, BLOCK_D).to(tl.float32)
        sums = tl.load(lse + head * count + index, mask=live, other=0.0)
        product = tl.load(delta + head * count + index, mask=live, other=0.0)
        weight = tl.exp(tl.sum(q * k, 1) * scale - sums)
        slope = weight * (tl.sum(do * v, 1) - product) * scale
        for_key += slope[:, None] * q
        for_value += weight[:, None] * do
    _put(by_key + at, index, live, for_key, SIZE, BLOCK_D)
    _put(by_value + at, index, live, for_value, SIZE, BLOCK_D)
