"""Attention over ragged requests: one flat row of new tokens, every request with its own length.

A batch is never padded. The new tokens of all requests stand one after the other in one row; `Span`
says which tokens belong to which request, where its cached prefix ends, and, for a draft tree, who
is whose ancestor. The same function serves packed training rows (no cache), prefill, drafting and
verification, for the target (through transformers' attention interface) and for the head.

Shapes: T new tokens of all requests, n of one request, P cached prefix, h query heads, g key/value
heads, d head size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from headsmith.errors import HeadsmithError
from headsmith.models.spans import KeyValueStore, Masks, Span, Stack

NAME = "headsmith"
# Scores [h, rows, keys] that exist at a time where they are written out: 256 MiB in float32.
SCORES = 1 << 26


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    *,
    layer: int = 0,
    cache: KeyValueStore | None = None,
    last_only: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    masks: Masks | None = None,
) -> Tensor:
    """Attend within each span and its cached prefix.

    query [h, T, d], key [g, T, d], value [g, T, d_v], of one dtype; h is a multiple of g. With
    `last_only` the query holds one row a span, [h, spans, d]: that of its last token. `window` is
    the number of latest positions a token sees (itself included), `softcap` the tanh cap of the
    scores, `sinks` [h] the learned scores of gpt-oss. `masks` are those of these spans, shared by
    the layers of a pass. Returns [h, T, d_v], or [h, spans, d_v].
    """
    if cache is not None and not last_only:
        done = cache.attend(
            layer,
            spans,
            query,
            key,
            value,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        if done is not None:
            return done
    masks = Masks(spans, query.device) if masks is None else masks
    groups = query.shape[0] // key.shape[0]
    plain = softcap is None and sinks is None
    if plain and not last_only and cache is not None and _stackable(spans):
        return _attend_stacked(query, key, value, masks.stack(window, groups), layer, cache, scale)
    outputs, begin = [], 0
    for index, span in enumerate(spans):
        end = begin + span.length
        keys, values = key[:, begin:end], value[:, begin:end]
        if cache is not None:
            keys, values = cache.extend(layer, span, keys, values)
        rows = query[:, index : index + 1] if last_only else query[:, begin:end]
        mask = masks.of(index, keys.shape[1], window, groups if plain else 1, last_only)
        if plain:
            outputs.append(_attend(rows, keys, values, mask, scale))
        else:
            outputs.append(_explicit(rows, keys, values, mask, scale, softcap, sinks))
        begin = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _stackable(spans: Sequence[Span]) -> bool:
    """Several requests with the same small number of new tokens: one call beats one a request."""
    n = spans[0].length
    # A long prefill would spend its mask on tokens that causal order already hides.
    return len(spans) > 1 and n <= 128 and all(span.length == n for span in spans)


def _attend_stacked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stack: Stack,
    layer: int,
    cache: KeyValueStore,
    scale: float | None,
) -> Tensor:
    """All spans of a stack at once; shorter prefixes read stale rows of their slots, which the mask
    hides.
    """
    heads, total, d = query.shape
    batch, n = stack.rows.shape
    keys, values = cache.extend_all(layer, stack, key, value)
    packed = query.view(heads, batch, n, d).transpose(0, 1).reshape(batch, len(key), -1, d)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=stack.mask, scale=scale)
    return out.reshape(batch, heads, n, -1).transpose(0, 1).reshape(heads, total, -1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """One span; the mask has the rows of every head of a group."""
    heads, n, _ = query.shape
    groups = heads // keys.shape[0]
    if mask is None and n > 1:
        return F.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            is_causal=True,
            scale=scale,
            enable_gqa=groups > 1,
        )[0]
    # The query heads of a group stand as further rows of its one key/value head: no key is copied.
    packed = query.reshape(keys.shape[0], groups * n, -1)
    out = F.scaled_dot_product_attention(
        packed[None], keys[None], values[None], attn_mask=mask, scale=scale
    )
    return out[0].reshape(heads, n, -1)


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores written out, for what scaled_dot_product_attention cannot do; so many rows at a time
    that a long document does not need the square of its length.
    """
    heads, n, _ = query.shape
    groups = heads // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    column = torch.arange(keys.shape[1], device=query.device)
    size = max(1, SCORES // (heads * len(column)))
    outputs = []
    for begin in range(0, n, size):
        rows = slice(begin, min(begin + size, n))
        seen = mask[rows] if mask is not None else None
        if mask is None and n > 1:
            seen = column <= column[rows, None]
        outputs.append(_explicit_rows(query[:, rows], keys, values, seen, scale, softcap, sinks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _explicit_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Rows [h, m, d] with keys and values [h, P + n, d]; mask bool [m, P + n] of what is seen."""
    heads, n, d = query.shape
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ keys.transpose(1, 2)).to(precision)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(precision)[:, None, None].expand(heads, n, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(values.dtype) @ values


@dataclass(slots=True)
class _Pass:
    spans: Sequence[Span]
    cache: KeyValueStore | None
    masks: Masks | None = None


# The pass that the target is running: transformers' models do not all hand keyword arguments down
# to attention.
_current: _Pass | None = None


@contextmanager
def attending(spans: Sequence[Span], cache: KeyValueStore | None = None) -> Iterator[None]:
    """Within this block a target that was loaded with `attn_implementation="headsmith"` attends by
    these spans.
    """
    global _current
    before, _current = _current, _Pass(spans, cache)
    try:
        yield
    finally:
        _current = before


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, h, T, d] -> ([1, T, h, d_v], None)."""
    assert query.shape[0] == 1, "requests stand in one flat row"
    running = _current or _Pass([Span(query.shape[2])], None)
    # Made here, since before the first layer nobody knows the device that the masks are read on.
    running.masks = running.masks or Masks(running.spans, query.device)
    out = ragged_attention(
        query[0],
        key[0],
        value[0],
        running.spans,
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        cache=running.cache,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        masks=running.masks,
    )
    return out.transpose(0, 1)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The spans say who sees whom; transformers need not build a mask."""


def attach(model: PreTrainedModel, path: str) -> None:
    """Let a model attend by spans from now on.

    Raises HeadsmithError for an architecture whose attention cannot be replaced.
    """
    model.set_attn_implementation(NAME)
    used = model.get_decoder().config._attn_implementation
    if used != NAME:
        raise HeadsmithError(
            f"{path}: {type(model).__name__} does not attend through transformers' attention "
            "interface, so packed documents and draft trees cannot be kept apart; this "
            "architecture cannot be a target"
        )


def register() -> None:
    """Make `attn_implementation="headsmith"` known to transformers (idempotent)."""
    interface: Callable[..., Any] = _interface
    AttentionInterface.register(NAME, interface)
    AttentionMaskInterface.register(NAME, _no_mask)


register()
