"""Reading prompts: whole, or in chunks so that a long one does not keep the others waiting.

Shapes: H target width, V target vocabulary, n requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.active import Active
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.records import Request
from headsmith.models.spans import Span
from headsmith.models.target import Target


def longest_of(requests: Sequence[Request], limit: int) -> int:
    """Tokens of the longest prompt. Raises HeadsmithError for one that is empty or fills a context
    of `limit` tokens.
    """
    for request in requests:
        if not 0 < len(request.prompt_ids) < limit:
            raise HeadsmithError(
                f"prompt {request.id} has {len(request.prompt_ids)} tokens; between 1 and "
                f"{limit - 1} fit the target's context"
            )
    return max((len(r.prompt_ids) for r in requests), default=0)


def parts_of(reading: list[Active], chunk: int | None) -> list[tuple[Active, int]]:
    """What the next pass reads: requests, in the order of their slots, and tokens of each, `chunk`
    of all together at most.
    """
    if chunk is None:
        return [(a, a.unread) for a in reading]
    left, parts = chunk, []
    for a in sorted(reading, key=lambda a: a.index):
        if left:
            parts.append((a, min(left, a.unread)))
            left -= parts[-1][1]
    return sorted(parts, key=lambda part: part[0].slot)


def read_prompts(
    target: Target, cache: KeyValueCache, taps: Sequence[int], parts: list[tuple[Active, int]]
) -> tuple[list[Active], list[Tensor]]:
    """One pass over parts of prompts: the requests whose prompt is read now, and the state [H]
    behind each.
    """
    ids = [t for a, n in parts for t in a.request.prompt_ids[a.cached : a.cached + n]]
    spans = [Span(n, a.cached, a.slot) for a, n in parts]
    features = target.run(torch.tensor(ids, device=target.device), spans, cache, taps)
    sizes = [n for _, n in parts]
    whole, states = [], []
    for (a, n), tapped, last in zip(
        parts, features.taps.split(sizes), features.last.split(sizes), strict=True
    ):
        a.cached += n
        a.taps.append(tapped)
        if not a.unread:
            whole.append(a)
            states.append(last[-1])
    return whole, states


def refuse_nan(target: Target, fresh: list[Active], logits: Tensor) -> None:
    """NaN in a prompt's states reaches all that follows, so looking at the logits [n, V] behind it
    is enough. Raises HeadsmithError.
    """
    for a, finite in zip(fresh, logits.isfinite().all(-1).tolist(), strict=True):
        if not finite:
            raise HeadsmithError(
                f"the logits of the target {target.path} for prompt {a.request.id} hold "
                "NaN or infinity; try float32, or get the target's weights again"
            )
