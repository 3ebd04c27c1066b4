"""Unroll attention on a CPU, in few and large operations of torch.

A piece of queries has all its scores in one matrix, those of the step-0 keys and behind them its
own later ones, which torch's softmax and the backward of it go through once. What is hidden has a
large number taken off: an assignment under a mask costs more, and an exponential of -inf outside of
that softmax more than all the rest. Own keys make no matrix product, a query having its own; they
are gone through for all queries together. The backward makes scores and softmax again where they
are too many to be kept.

Shapes as in `headsmith.train.kernels.unroll_attention`; c keys of a piece of m queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headsmith.models.linear import at_least_float32
from headsmith.train.kernels.unroll_attention import Layout

# Scores of a piece, over all heads: what several passes find in the cache again.
ELEMENTS = 1 << 19
# Queries of a piece, whatever that makes of the scores.
LEAST = 64
# Bytes of weights that a step of the unroll keeps for its backward.
KEPT = 32 << 20
# Added to the score of a key that is hidden: beside any other its weight is exactly zero.
HIDDEN = -1e30


def forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    layout: Layout,
) -> tuple[Tensor, list[Tensor]]:
    """The output [h, n, d] of inputs of one dtype, and the weights of its pieces if they are few
    enough to be kept: [g, G, m, c + k] each.
    """
    q = query.unflatten(0, (len(keys), -1))
    scaled = _scaled(q)
    own_keys, own_values = at_least_float32(own_keys), at_least_float32(own_values)
    own = _dots(scaled, own_keys)
    out, shares, kept, room = torch.empty_like(q), torch.empty_like(own), [], KEPT
    for piece in _pieces(scaled, keys, len(own_keys), layout):
        weights = piece.weights(own)
        shares[:, :, piece.queries] = weights[..., piece.count :]
        weights = weights.to(keys.dtype)
        room -= weights.nbytes
        if room >= 0:
            kept.append(weights)
        made = torch.bmm(piece.shared(weights), values[:, piece.seen])
        out[:, :, piece.queries] = made.unflatten(1, weights.shape[1:3])
    out = _with_own(out, shares, own_values).flatten(0, 1).to(query.dtype)
    return out, kept if room >= 0 else []


def backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    kept: list[Tensor],
    grad: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by the first five, from the gradient [h, n, d] by the output; `kept` as `forward`
    returned it.
    """
    q, g = (x.unflatten(0, (len(keys), -1)) for x in (query, grad))
    scaled, dtype = _scaled(q), own_keys.dtype
    own_keys, own_values = at_least_float32(own_keys), at_least_float32(own_values)
    wide = at_least_float32(g) if len(own_keys) else g
    own = None if kept else _dots(scaled, own_keys)
    by_share = _dots(wide, own_values)
    shares, slopes = torch.empty_like(by_share), torch.empty_like(by_share)
    by_share, by_query = by_share.to(keys.dtype), torch.empty_like(q)
    by_key, by_value = (at_least_float32(torch.zeros_like(x)) for x in (keys, values))
    for i, piece in enumerate(_pieces(scaled, keys, len(own_keys), layout)):
        weights = kept[i] if own is None else piece.weights(own).to(keys.dtype)
        out_grad = g[:, :, piece.queries].flatten(1, 2)
        by_weight = torch.bmm(out_grad, values[:, piece.seen].transpose(1, 2))
        by_weight = piece.joined(by_weight, by_share)
        by_score = torch._softmax_backward_data(by_weight, weights, -1, weights.dtype)
        for all_queries, piecewise in ((shares, weights), (slopes, by_score)):
            all_queries[:, :, piece.queries] = piecewise[..., piece.count :]
        shared = piece.shared(by_score)
        made = torch.bmm(shared, piece.keys)
        by_query[:, :, piece.queries] = made.unflatten(1, weights.shape[1:3])
        by_key[:, piece.seen] += torch.bmm(shared.transpose(1, 2), piece.scaled)
        by_value[:, piece.seen] += torch.bmm(piece.shared(weights).transpose(1, 2), out_grad)
    by_query = _scaled(_with_own(by_query, slopes, own_keys))
    return (
        by_query.flatten(0, 1).to(query.dtype),
        by_key.to(keys.dtype),
        by_value.to(values.dtype),
        _back(slopes, scaled).to(dtype),
        _back(shares, wide).to(dtype),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """Some queries of one document: their places among all, and scaled [g, G m, d]; the keys that
    any of them sees: their places, and themselves [g, c, d].
    """

    layout: Layout
    queries: slice
    seen: slice
    scaled: Tensor
    keys: Tensor

    @property
    def count(self) -> int:
        return self.keys.shape[1]

    def weights(self, own: Tensor) -> Tensor:
        """The softmax [g, G, m, c + k] of all scores; those of all queries' own are given."""
        scores = self.joined(torch.bmm(self.scaled, self.keys.transpose(1, 2)), own)
        hidden = self.layout.hidden(own.shape[-1], self.queries, self.seen)
        scores[..., : self.count] += hidden.to(own.dtype).mul_(HIDDEN)
        return scores.softmax(-1)

    def joined(self, shared: Tensor, own: Tensor) -> Tensor:
        """[g, G m, c] of the shared keys and [g, G, n, k] of all queries' own: [g, G, m, c + k]."""
        own = own[:, :, self.queries]
        if own.shape[3] == 0:
            return shared.unflatten(1, own.shape[1:3]).to(own.dtype)
        both = own.new_empty(*own.shape[:3], self.count + own.shape[3])
        both[..., : self.count] = shared.unflatten(1, own.shape[1:3])
        both[..., self.count :] = own
        return both

    def shared(self, both: Tensor) -> Tensor:
        """The other way [g, G m, c]."""
        return both.flatten(1, 2)[..., : self.count]


def _pieces(scaled: Tensor, keys: Tensor, later: int, layout: Layout) -> Iterator[Piece]:
    heads, longest = scaled.shape[0] * scaled.shape[1], max(layout.lengths)
    size = max(LEAST, ELEMENTS // (heads * longest))
    q = scaled.to(keys.dtype)
    for queries, seen in layout.pieces(later, size):
        yield Piece(layout, queries, seen, q[:, :, queries].flatten(1, 2), keys[:, seen])


def _scaled(q: Tensor) -> Tensor:
    """q / sqrt(d), in float32 at least."""
    return at_least_float32(q) * (1 / math.sqrt(q.shape[-1]))


def _dots(rows: Tensor, own: Tensor) -> Tensor:
    """rows [g, G, n, d] and own [k, g, n, d] -> [g, G, n, k]."""
    if len(own) == 0:
        return at_least_float32(rows.new_empty(*rows.shape[:3], 0))
    return torch.einsum("gqnd,kgnd->gqnk", rows, own)


def _with_own(shared: Tensor, weights: Tensor, own: Tensor) -> Tensor:
    """shared [g, G, n, d] and the weighted [g, G, n, k] own [k, g, n, d], added up."""
    if len(own) == 0:
        return shared
    out = at_least_float32(shared)
    for weight, one in zip(weights.unbind(-1), own, strict=True):
        out.addcmul_(weight[..., None], one[:, None])
    return out


def _back(weights: Tensor, rows: Tensor) -> Tensor:
    """What each of own [k, g, n, d] gets: weights [g, G, n, k] of rows [g, G, n, d], summed over
    the heads of a group.
    """
    groups, heads, count, later = weights.shape
    out = rows.new_empty(later, groups, count, rows.shape[-1])
    for one, weight in zip(out, weights.unbind(-1), strict=True):
        torch.mul(weight[:, 0, :, None], rows[:, 0], out=one)
        for head in range(1, heads):
            one.addcmul_(weight[:, head, :, None], rows[:, head])
    return out
