"""Sampling settings at work on logits, at every node of a tree as in plain decoding: a row is
changed by the text before it, its drafted ancestors included, and by nothing else.

Shapes: n rows, V target vocabulary. See `headsmith.inference.sampling` for the order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.noise import Place
from headsmith.inference.sampling import Shaping

# Tokens of a row among which its nucleus is looked for first.
LIKELIEST = 2048


def adjust(shaping: Shaping, logits: Tensor, places: Sequence[Place]) -> Tensor:
    """Bias and penalties on logits [n, V]: float32 [n, V], the input left as it was."""
    adjusted = logits.float()
    if not shaping.adjusts:
        return adjusted
    adjusted = adjusted.clone()
    if shaping.bias:
        ids, values = zip(*shaping.bias, strict=True)
        if max(ids) >= logits.shape[1]:
            raise HeadsmithError(
                f"logit-bias names token {max(ids)} and the target's ids end at "
                f"{logits.shape[1] - 1}"
            )
        adjusted[:, list(ids)] += torch.tensor(values, device=logits.device)
    if shaping.penalises:
        for row, place in zip(adjusted, places, strict=True):
            _penalise(shaping, row, place)
    return adjusted


def _penalise(shaping: Shaping, row: Tensor, place: Place) -> None:
    """Penalties in place on one row [V]."""
    counts = Counter(place.written)
    counts.update(place.path)
    if shaping.repetition != 1:
        seen = torch.tensor(sorted(counts.keys() | set(place.prompt)), device=row.device)
        values = row[seen]
        # Towards less likely on either side of zero.
        row[seen] = torch.where(
            values > 0, values / shaping.repetition, values * shaping.repetition
        )
    if counts and (shaping.frequency or shaping.presence):
        ids = torch.tensor(list(counts), device=row.device)
        often = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= shaping.frequency * often + shaping.presence


def cut(shaping: Shaping, scores: Tensor, slack: float = 0.0) -> Tensor:
    """Scores (logits / temperature) float32 [n, V] with -inf where top-k, top-p or min-p leaves a
    token out; at least the likeliest stays.

    `slack` other than 0 is for telling a fault from rounding: above 0 keeps every token that could
    be kept if the scores of any two were off by `slack` against each other, below 0 only those
    that then could not be left out, which may be none.
    """
    if not shaping.cuts:
        return scores
    k = shaping.top_k
    if k is not None and k < scores.shape[-1]:
        best = scores.topk(k + 1).values
        bar = best[:, k - 1 : k] - slack if slack >= 0 else best[:, k:] - slack
        scores = scores.masked_fill(scores < bar, -math.inf)
    if shaping.top_p < 1:
        scores = scores.masked_fill(~_nucleus(scores, shaping.top_p, slack), -math.inf)
    if shaping.min_p > 0:
        bar = scores.max(-1, keepdim=True).values + math.log(shaping.min_p) - slack
        scores = scores.masked_fill(scores < bar, -math.inf)
    return scores


def _nucleus(scores: Tensor, mass: float, slack: float) -> Tensor:
    """bool [n, V]: the fewest likeliest tokens that have `mass` together; of equal ones the lower
    id first.
    """
    if slack or scores.shape[1] <= LIKELIEST:
        return _nucleus_sorted(scores, mass, slack)
    # A few tokens mostly have the mass, and sorting all of them takes longer than all the rest. Of
    # a row nothing depends on the rows beside it.
    best = scores.topk(LIKELIEST, sorted=True).values
    p = (best - best[:, :1]).exp() * scores.softmax(-1).amax(-1, keepdim=True)
    reached = p.cumsum(-1) >= mass
    count = reached.int().argmax(-1, keepdim=True) + 1
    bar = best.gather(1, count - 1)
    kept = scores >= bar
    if (kept.sum(-1, keepdim=True) > count).any():
        same = scores == bar
        room = count - (kept & ~same).sum(-1, keepdim=True)
        kept &= ~same | (same.cumsum(-1) <= room)
    flat = ~reached[:, -1]
    if flat.any():
        kept[flat] = _nucleus_sorted(scores[flat], mass, slack)
    return kept


def _nucleus_sorted(scores: Tensor, mass: float, slack: float) -> Tensor:
    """The same by sorting all tokens."""
    ordered, order = scores.sort(stable=True, descending=True)
    p = ordered.softmax(-1)
    before = torch.nn.functional.pad(p.cumsum(-1), (1, 0))
    if slack:
        # Who may stand before a token is as unsure as how much they weigh.
        ahead = torch.searchsorted(-ordered, -(ordered + slack))
        before = before.gather(-1, ahead) - (p if slack < 0 else 0)
        odds = mass / (1 - mass) * math.exp(slack)
        mass = odds / (1 + odds)
    else:
        before = before[:, :-1]
    return torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, before < mass)
