"""Queries, keys and values of the unroll, with the embedding's half of each product made once.

What attention reads at a row is [norm(embedding) ; norm(state)] (spec/eagle.md 1.2), and the token
of row i at step k is x[i+1+k]: every token is read by one row at each step. Its half of the
products with W_q, W_k and W_v is the same every time, so it is made once a token and gathered; in
the backward the steps' gradients are added up before they are multiplied. Of a step remains the
state's half.

Shapes: T tokens of a packed row, n rows, H head width, h query and g key/value heads of size d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headsmith.models.eagle3 import Layer, rotate
from headsmith.models.products import linear


def take(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """x at `rows` int64 [n] of a dimension, ascending and without repetition; x itself where these
    are all. The gradient adds up nothing.
    """
    return x if len(rows) == x.shape[dim] else x.index_select(dim, rows)


class Projections:
    """The products of one packed row.

    embeds [T, H]: embedding of every token, where a key is made of all of them and a query of
    those in `queried` int64 ascending.
    """

    def __init__(self, layer: Layer, embeds: Tensor, queried: Tensor) -> None:
        attention, width = layer.self_attn, layer.config.hidden_size
        self._layer, self._queried = layer, queried
        query = attention.q_proj.weight
        key_value = torch.cat((attention.k_proj.weight, attention.v_proj.weight))
        biases = (attention.k_proj.bias, attention.v_proj.bias)
        bias = None if biases[0] is None else torch.cat(biases)
        normed = layer.input_layernorm(embeds)
        self._query_weight, self._key_value_weight = query[:, width:], key_value[:, width:]
        self._queries = linear(take(normed, queried), query[:, :width], attention.q_proj.bias)
        self._key_values = linear(normed, key_value[:, :width], bias)

    def query(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed states [n, H] and the tokens' places int64 [n] ascending -> rotated queries
        [h, n, d].
        """
        place = torch.searchsorted(self._queried, tokens)
        product = linear(state, self._query_weight) + take(self._queries, place)
        return rotate(self._heads(product), cos, sin)

    def key_value(
        self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, tokens in any order but each once -> rotated keys and values, [g, n, d]."""
        embedded = self._key_values.index_select(0, tokens)
        product = linear(state, self._key_value_weight) + embedded
        keys, values = self._heads(product).chunk(2)
        return rotate(keys, cos, sin), values

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self._layer.config.head_dim)).transpose(0, 1)
