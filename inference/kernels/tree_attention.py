"""Attention of draft trees over the cache (spec/verifier.md 4.1), and its plain reference.

The prefix that all nodes of a request see needs no mask, and each of its tiles is read once for all
of them; only the nodes themselves look each other up in words of ancestor bits. The query heads of
a key/value head stand as further rows of it.

Shapes: B requests, T new tokens of all, h query heads, g key/value heads, d head size.
"""

import torch
from torch import Tensor

from headsmith.inference.kernels import runs, use_kernels
from headsmith.inference.kernels.plan import Plan


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [h, T, d] of the plan's new tokens, whose keys and values are already stored; keys
    [slots, g, capacity, d] and values [slots, g, capacity, d_v] of one layer, of the query's dtype.
    `window`, `softcap` and `sinks` as in models/attention.py. Returns [h, T, d_v].
    """
    if use_kernels(query.device):
        from headsmith.inference.kernels.tree_attention_launch import launch

        runs("tree attention")
        return launch(
            query, keys, values, plan, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    return reference(
        query, keys, values, plan, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same, one request at a time with every score written out."""
    groups = query.shape[0] // keys.shape[1]
    precision = torch.promote_types(query.dtype, torch.float32)
    outputs = []
    for index, entry in enumerate(plan.requests.tolist()):
        slot, start, begin, n, tail, deep, _ = entry
        mine = keys[slot, :, : start + tail].repeat_interleave(groups, 0)
        scores = (query[:, begin : begin + n] @ mine.transpose(1, 2)).to(precision)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = torch.ones(n, start + tail, dtype=torch.bool, device=query.device)
        seen[:, start:] = plan.visible(index)
        if window is not None:
            depths = plan.depths[deep : deep + tail]
            before = torch.arange(-start, 0, device=query.device)
            seen &= depths[tail - n :, None] - torch.cat([before, depths]) < window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.to(precision)[:, None, None].expand(-1, n, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : start + tail].to(values.dtype)
        outputs.append(weights @ values[slot, :, : start + tail].repeat_interleave(groups, 0))
    return torch.cat(outputs, dim=1)
