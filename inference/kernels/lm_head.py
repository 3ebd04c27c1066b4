"""The output matrix without its logits: the k likeliest ids and the log-sum-exp of each row, and
the plain reference.

A draft head needs log-probabilities of its k likeliest ids (k = topk, and `ids` maps its own
vocabulary to the target's); a greedy target needs its likeliest id (k = 1). Neither reads the rest,
so nothing of the size of rows times vocabulary is written.

Shapes: n rows, H width, V vocabulary of the matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headsmith.inference.kernels import runs, use_kernels


class Best(NamedTuple):
    """`logits` float32 [n, k] descending, their target `ids` int64 [n, k], and the log-sum-exp
    `lse` float32 [n] of all logits of the row: log-probabilities are logits - lse[:, None].
    """

    logits: Tensor
    ids: Tensor
    lse: Tensor


def best_tokens(x: Tensor, weight: Tensor, k: int = 1, ids: Tensor | None = None) -> Best:
    """The k likeliest of the logits x [n, H] @ weight [V, H] transposed; `ids` int64 [V] are the
    target ids of the matrix's rows, which are the ids themselves without it. Of equal logits the
    lower id comes first.
    """
    assert 0 < k <= len(weight), f"{k} of {len(weight)} ids"
    if use_kernels(x.device):
        from headsmith.inference.kernels.lm_head_triton import launch

        runs("lm_head")
        return launch(x, weight, k, ids)
    return reference(x, weight, k, ids)


def reference(x: Tensor, weight: Tensor, k: int = 1, ids: Tensor | None = None) -> Best:
    """The same, by way of all logits."""
    product = x @ weight.T
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    values, columns = logits.sort(dim=-1, descending=True, stable=True)
    chosen = columns[:, :k] if ids is None else ids[columns[:, :k]]
    return Best(values[:, :k], chosen, logits.logsumexp(-1))
