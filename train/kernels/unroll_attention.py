"""Attention of one unroll step as an autograd function, and its reference (spec/eagle.md 3.2).

Row i of a document sees the step-0 keys of its document up to i, and its own later keys, one a
step. Scores are made a chunk of queries at a time, and made again in the backward: nothing of the
size of queries times keys is kept.

Shapes: T tokens of a packed row, n of them with queries, k later keys of each, h query heads and g
key/value heads (G = h / g), d head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headsmith.inference.kernels import use_kernels
from headsmith.models.linear import at_least_float32

# Queries whose scores exist at a time, [h, CHUNK, keys].
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """Who sees whom: `rows` int64 [n] ascending, the places of the queries in the packed row, whose
    documents have these `lengths` (sum T); `window` as in `ragged_attention`.
    """

    rows: Tensor
    lengths: Sequence[int]
    window: int | None = None

    def pieces(self, later: int, size: int) -> Iterator[tuple[slice, slice]]:
        """At most `size` queries of one document, and the keys that any of them sees."""
        ends = torch.tensor(self.lengths, device=self.rows.device).cumsum(0)
        cuts = torch.searchsorted(self.rows, ends).tolist()
        start, first = 0, 0
        for length, cut in zip(self.lengths, cuts, strict=True):
            for begin in range(first, cut, size):
                queries = slice(begin, min(begin + size, cut))
                # Keys behind the last query are seen by no one.
                low, high = start, int(self.rows[queries.stop - 1]) + 1
                if self.window is not None:
                    low = min(max(low, int(self.rows[begin]) + later - self.window + 1), high)
                yield queries, slice(low, high)
            start, first = start + length, cut

    def hidden(self, later: int, queries: slice, seen: slice) -> Tensor:
        """Which keys of a piece are hidden from each of its queries, bool [m, keys]."""
        place = self.rows[queries, None]
        column = torch.arange(seen.start, seen.stop, device=self.rows.device)
        hidden = column > place
        if self.window is not None:
            # A step-k query stands k positions behind its row.
            hidden |= place + later - column >= self.window
        return hidden


def unroll_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    rows: Tensor,
    lengths: Sequence[int],
    window: int | None = None,
) -> Tensor:
    """Attention of the queries [h, n, d] of the rows `rows` int64 [n] to keys and values [g, T, d]
    of step 0 and their own of later steps, k pairs [g, n, d]. Returns [h, n, d].

    Products are made in the dtype of autocast, or that of the query; the softmax in float32 at
    least.
    """
    device = query.device.type
    narrow = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if narrow else query.dtype
    shape = (0, *keys.shape[:1], *query.shape[1:])
    own_keys = torch.stack([key for key, _ in own]) if own else keys.new_zeros(shape)
    own_values = torch.stack([value for _, value in own]) if own else values.new_zeros(shape)
    inputs = [x.to(dtype) for x in (query, keys, values, own_keys, own_values)]
    return UnrollAttention.apply(*inputs, Layout(rows, lengths, window))


class UnrollAttention(torch.autograd.Function):
    """Inputs of one dtype: query [h, n, d], keys and values [g, T, d], own keys and values
    [k, g, n, d].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        layout: Layout,
    ) -> Tensor:
        inputs = (query.contiguous(), keys.contiguous(), values.contiguous(), own_keys, own_values)
        if on_cpu(query):
            from headsmith.train.kernels import unroll_attention_cpu as cpu

            # Made here and given to no one: nobody can change them, and they need no watching.
            out, ctx.weights = cpu.forward(*inputs, layout)
            ctx.save_for_backward(*inputs)
        else:
            out, lse = forward(*inputs, layout)
            ctx.save_for_backward(*inputs, out, lse)
        ctx.layout = layout
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, *made = ctx.saved_tensors
        inputs = (query, keys, values, own_keys, own_values)
        if not made:
            from headsmith.train.kernels import unroll_attention_cpu as cpu

            return *cpu.backward(*inputs, ctx.weights, grad, ctx.layout), None
        out, lse = made
        return *backward(*inputs, out, lse, grad.contiguous(), ctx.layout), None


def on_cpu(query: Tensor) -> bool:
    """Whether attention goes the way of `headsmith.train.kernels.unroll_attention_cpu`."""
    return query.device.type == "cpu" and not use_kernels(query.device)


def forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """The output [h, n, d] and the log-sum-exp of the scores [h, n], float32 at least."""
    if use_kernels(query.device):
        from headsmith.train.kernels.unroll_attention_launch import launch_forward as made
    else:
        made = reference_forward
    return made(query, keys, values, own_keys, own_values, layout)


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
    """Gradients by the first five; `grad` [h, n, d] is that by the output."""
    # What the softmax takes back of every weight's gradient.
    delta = (at_least_float32(grad) * out).sum(-1)
    if use_kernels(query.device):
        from headsmith.train.kernels.unroll_attention_launch import launch_backward as made
    else:
        made = reference_backward
    return made(query, keys, values, own_keys, own_values, lse, delta, grad, layout)


def reference_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """`forward` in plain PyTorch."""
    groups = len(keys)
    out = torch.empty_like(query)
    lse = at_least_float32(query.new_empty(query.shape[:2]))
    with torch.autocast(query.device.type, enabled=False):
        for queries, seen in layout.pieces(len(own_keys), CHUNK):
            hidden = layout.hidden(len(own_keys), queries, seen)
            q = query[:, queries].unflatten(0, (groups, -1))
            scores = _scores(q, keys[:, seen], own_keys[:, :, queries], hidden)
            sums = scores.logsumexp(-1)
            weights = scores.sub_(sums[..., None]).exp_()
            attended = _sum(weights, values[:, seen], own_values[:, :, queries])
            out[:, queries] = attended.flatten(0, 1).to(out.dtype)
            lse[:, queries] = sums.flatten(0, 1)
    return out, lse


def reference_backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`backward` in plain PyTorch."""
    groups, later, scale = len(keys), len(own_keys), 1 / math.sqrt(query.shape[-1])
    by_query, by_own_key, by_own_value = map(torch.zeros_like, (query, own_keys, own_values))
    by_key, by_value = (at_least_float32(torch.zeros_like(x)) for x in (keys, values))
    with torch.autocast(query.device.type, enabled=False):
        for queries, seen in layout.pieces(later, CHUNK):
            hidden = layout.hidden(later, queries, seen)
            q, out_grad = (x[:, queries].unflatten(0, (groups, -1)) for x in (query, grad))
            sums, product = (x[:, queries].unflatten(0, (groups, -1)) for x in (lse, delta))
            own_key, own_value = own_keys[:, :, queries], own_values[:, :, queries]
            weights = _scores(q, keys[:, seen], own_key, hidden).sub_(sums[..., None]).exp_()
            # What a weight would give is what its value gives: the scores of the values.
            slopes = _products(out_grad, values[:, seen], own_value)
            slopes = slopes.sub_(product[..., None]).mul_(weights).mul_(scale)
            by_query[:, queries] = _sum(slopes, keys[:, seen], own_key).flatten(0, 1).to(q.dtype)
            count = seen.stop - seen.start
            by_key[:, seen] += _back(slopes[..., :count], q)
            by_value[:, seen] += _back(weights[..., :count], out_grad)
            for j in range(later):
                by_own_key[j, :, queries] = _own(slopes[..., count + j], q)
                by_own_value[j, :, queries] = _own(weights[..., count + j], out_grad)
    return by_query, by_key.to(keys.dtype), by_value.to(values.dtype), by_own_key, by_own_value


def _scores(q: Tensor, keys: Tensor, own: Tensor, hidden: Tensor) -> Tensor:
    """Scaled scores [g, G, m, keys + k] of queries [g, G, m, d]."""
    scores = _products(q, keys, own).mul_(1 / math.sqrt(q.shape[-1]))
    scores[..., : keys.shape[1]].masked_fill_(hidden, -math.inf)
    return scores


def _products(q: Tensor, keys: Tensor, own: Tensor) -> Tensor:
    """q [g, G, m, d] times keys [g, c, d] and own [k, g, m, d] -> [g, G, m, c + k]."""
    # The query heads of a group stand as further rows of its one key/value head.
    shared = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3])
    wide = at_least_float32(q)
    later = [(wide * key[:, None]).sum(-1, keepdim=True) for key in own]
    return torch.cat([at_least_float32(shared), *later], -1)


def _sum(weights: Tensor, values: Tensor, own: Tensor) -> Tensor:
    """weights [g, G, m, c + k] of values [g, c, d] and own [k, g, m, d] -> [g, G, m, d]."""
    count = values.shape[1]
    shared = weights[..., :count].flatten(1, 2).to(values.dtype) @ values
    out = at_least_float32(shared).unflatten(1, weights.shape[1:3])
    for j, value in enumerate(own):
        out = out + weights[..., count + j, None] * value[:, None]
    return out


def _back(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [g, G, m, c], rows [g, G, m, d] -> what each of the c keys gets, [g, c, d]."""
    return weights.flatten(1, 2).to(rows.dtype).transpose(1, 2) @ rows.flatten(1, 2)


def _own(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [g, G, m], rows [g, G, m, d] -> the sum over a group's heads [g, m, d]."""
    return (weights[..., None] * rows).sum(1).to(rows.dtype)
