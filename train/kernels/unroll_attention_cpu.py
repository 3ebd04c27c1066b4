"""Unroll attention on a CPU, with torch's own flash attention for the keys of step 0.

Of all ways to leave a key out, -inf in an exponential of millions of numbers is the slowest on a
CPU; torch's operation works in tiles that stay in the cache. It returns the log-sum-exp of each
query, so the later keys of a row join in as they do anywhere: each part is weighed by its share.
Its backward asks for the output and the log-sum-exp, and given those of all keys together it
returns what the keys of step 0 have of the gradient.

Shapes as in `headsmith.train.kernels.unroll_attention`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headsmith.models.linear import at_least_float32
from headsmith.train.kernels.unroll_attention import Layout

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
# Queries at a time: of their square of keys half is hidden, and computed all the same.
CHUNK = 128


def runs(query: Tensor, layout: Layout) -> bool:
    """Whether this is the way for these queries: on a CPU, and each sees a key of step 0."""
    return (
        query.device.type == "cpu"
        and layout.window is None
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16)
        and hasattr(torch.ops.aten, _FORWARD)
        and hasattr(torch.ops.aten, f"{_FORWARD}_backward")
    )


def forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """`unroll_attention.forward`."""
    groups, later = len(keys), len(own_keys)
    out = torch.empty_like(query)
    lse = at_least_float32(query.new_empty(query.shape[:2]))
    for queries, seen, hidden in layout.pieces(later, CHUNK):
        q = query[:, queries].unflatten(0, (groups, -1))
        stacked, k, v, mask = _inputs(q, keys[:, seen], values[:, seen], hidden)
        shared, sums = getattr(torch.ops.aten, _FORWARD)(stacked, k, v, attn_mask=mask)
        shared, total = (x[0].unflatten(1, q.shape[1:3]) for x in (shared, sums))
        if later:
            scores = _own_scores(q, own_keys[:, :, queries])
            total = torch.logsumexp(torch.stack([total, *scores]), 0)
            wide = at_least_float32(shared) * (sums[0].view_as(total) - total).exp()[..., None]
            for score, value in zip(scores, own_values[:, :, queries], strict=True):
                wide.addcmul_((score - total).exp()[..., None], value[:, None])
            shared = wide
        out[:, queries] = shared.flatten(0, 1).to(out.dtype)
        lse[:, queries] = total.flatten(0, 1)
    return out, lse


def backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by the first five, from the output, its log-sum-exp and the gradient by it."""
    groups, later, scale = len(keys), len(own_keys), 1 / math.sqrt(query.shape[-1])
    by_query, by_own_key, by_own_value = map(torch.empty_like, (query, own_keys, own_values))
    by_key, by_value = (at_least_float32(torch.zeros_like(x)) for x in (keys, values))
    for queries, seen, hidden in layout.pieces(later, CHUNK):
        q, o, g, sums = (x[:, queries].unflatten(0, (groups, -1)) for x in (query, out, grad, lse))
        stacked, k, v, mask = _inputs(q, keys[:, seen], values[:, seen], hidden)
        flat = [x.flatten(1, 2)[None] for x in (g, o, sums)]
        made = getattr(torch.ops.aten, f"{_FORWARD}_backward")(
            flat[0], stacked, k, v, flat[1], flat[2], 0.0, False, attn_mask=mask
        )
        to_query = made[0][0].unflatten(1, q.shape[1:3])
        by_key[:, seen] += made[1][0]
        by_value[:, seen] += made[2][0]
        if later:
            wide, to_query = at_least_float32(g), at_least_float32(to_query)
            product = (wide * o).sum(-1)
            scores = _own_scores(q, own_keys[:, :, queries])
            for j, score in enumerate(scores):
                key, value = own_keys[j, :, None, queries], own_values[j, :, None, queries]
                weight = (score - sums).exp()
                slope = ((wide * value).sum(-1) - product).mul_(weight).mul_(scale)[..., None]
                to_query = to_query + slope * key
                by_own_key[j, :, queries] = (slope * q).sum(1).to(q.dtype)
                by_own_value[j, :, queries] = (weight[..., None] * g).sum(1).to(q.dtype)
        by_query[:, queries] = to_query.flatten(0, 1).to(q.dtype)
    return by_query, by_key.to(keys.dtype), by_value.to(values.dtype), by_own_key, by_own_value


def _inputs(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What torch's operation takes of queries [g, G, m, d]: the heads of a group as further rows of
    it [1, g, G m, d], keys, values, and what is added to the scores.
    """
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
    return q.flatten(1, 2)[None], keys[None], values[None], mask.repeat(q.shape[1], 1)[None, None]


def _own_scores(q: Tensor, own: Tensor) -> list[Tensor]:
    """Scaled scores of queries [g, G, m, d] with later keys [k, g, m, d]: k times [g, G, m]."""
    wide = at_least_float32(q) * (1 / math.sqrt(q.shape[-1]))
    return [(wide * key[:, None]).sum(-1) for key in own]
