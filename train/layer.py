"""The head's layer as the unroll runs it: what all steps share is made once a packed row.

What attention reads at a row is [norm(embedding) ; norm(state)] (spec/eagle.md 1.2), and the token
of row i at step k is x[i+1+k]: every token is read by one row at each step. The embedding's half of
the products with W_q, W_k and W_v is the same every time, so it is made once a token and gathered;
in the backward the steps' gradients are added up before they are multiplied. Of a step remains the
state's half, one product for queries, keys and values together, as gate and up are one.

Shapes: T tokens of a packed row, n rows, H head width, h query and g key/value heads of size d.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headsmith.models.eagle3 import Layer
from headsmith.models.products import linear
from headsmith.train.pointwise import rms_norm, rotated, swiglu
from headsmith.train.shared import Shared, SharedTable, product_dtype


def take(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """x at `rows` int64 [n] of a dimension, ascending and without repetition; x itself where these
    are all. The gradient adds up nothing.
    """
    return x if len(rows) == x.shape[dim] else x.index_select(dim, rows)


class UnrollLayer:
    """`headsmith.models.eagle3.Layer` for the steps of one packed row.

    embeds [T, H]: embedding of every token, where a key is made of all of them and a query of
    those in `queried` int64 ascending.
    """

    def __init__(self, layer: Layer, embeds: Tensor, queried: Tensor) -> None:
        attention, mlp, width = layer.self_attn, layer.mlp, layer.config.hidden_size
        self._layer, self._queried, self._size = layer, queried, layer.config.head_dim
        matrices = (attention.q_proj, attention.k_proj, attention.v_proj)
        queries, keys, values = (m.weight for m in matrices)
        self._columns = len(queries)
        self._states = Shared(*(m.weight[:, width:] for m in matrices))
        self._output = Shared(attention.o_proj.weight)
        self._gate_up = Shared(mlp.gate_proj.weight, mlp.up_proj.weight)
        self._down = Shared(mlp.down_proj.weight)
        normed = self._normed(embeds, layer.input_layernorm)
        key_value = torch.cat((keys[:, :width], values[:, :width]))
        bias = _joined(attention.k_proj.bias, attention.v_proj.bias)
        self._key_values = SharedTable(linear(normed, key_value, bias))
        query = queries[:, :width].contiguous()
        made = linear(take(normed, queried), query, attention.q_proj.bias)
        self._queries = SharedTable(made)

    def norm(self, z: Tensor) -> Tensor:
        """States [n, H] as attention reads them."""
        return self._normed(z, self._layer.hidden_norm)

    def query(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed states [n, H] and the tokens' places int64 [n] ascending -> rotated queries
        [h, n, d].
        """
        return self._query(self._states(state, slice(0, self._columns)), tokens, cos, sin)

    def key_value(
        self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, tokens in any order -> rotated keys and values, [g, n, d] each."""
        return self._key_value(self._states(state, slice(self._columns, None)), tokens, cos, sin)

    def query_key_value(
        self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Both of the same rows."""
        product = self._states(state)
        query, key_value = product.split((self._columns, product.shape[1] - self._columns), 1)
        return (
            self._query(query, tokens, cos, sin),
            self._key_value(key_value, tokens, cos, sin),
        )

    def output(self, z: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """Residual state z [n, H], its norm and attention output [h, n, d] -> g [n, H]."""
        layer, mlp = self._layer, self._layer.mlp
        residual = normed if layer.config.norm_before_residual else z
        r = residual + self._output(attended.transpose(0, 1).flatten(1))
        both = self._gate_up(self._normed(r, layer.post_attention_layernorm))
        bias = _joined(mlp.gate_proj.bias, mlp.up_proj.bias)
        down = self._down(swiglu(both if bias is None else both + bias))
        return r + (down if mlp.down_proj.bias is None else down + mlp.down_proj.bias)

    def _query(self, product: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        place = torch.searchsorted(self._queried, tokens)
        return rotated(self._heads(product + self._queries(place)), cos, sin).transpose(0, 1)

    def _key_value(
        self, product: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        heads = self._heads(product + self._key_values(tokens))
        keys, values = heads.chunk(2, 1)
        return rotated(keys, cos, sin).transpose(0, 1), values.transpose(0, 1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self._size))

    def _normed(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        return rms_norm(x, norm, product_dtype(norm.weight))


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat((first, second))
