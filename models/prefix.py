"""A prefix that all documents share, such as a system prompt: the target runs over it once.

Its keys and values stand before each document's own, so the states behind it are those of the whole
document, and its own states are the same in every document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headsmith.models.spans import Span, Stack


@dataclass(slots=True)
class Features:
    """What a head reads of T tokens: taps [T, m, H] and the post-norm last state [T, H]."""

    taps: Tensor
    last: Tensor


@dataclass(slots=True)
class Prefix:
    """Keys and values of p prefix tokens by layer, [g, p, d] each, and their states.

    A `KeyValueStore`: recording while its own tokens run, read-only for the spans behind it.
    `wanted` are the token ids and the taps that it was made for.
    """

    wanted: tuple[tuple[int, ...], tuple[int, ...]]
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: Features = field(default_factory=lambda: Features(torch.empty(0), torch.empty(0)))

    def extend(self, layer: int, span: Span, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix's keys and values before those of a span."""
        if layer not in self.layers:
            assert span.start == 0, "the prefix itself runs first"
            self.layers[layer] = (key.clone(), value.clone())
            return key, value
        before, values_before = self.layers[layer]
        return torch.cat([before, key], 1), torch.cat([values_before, value], 1)

    def extend_all(
        self, layer: int, stack: Stack, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for a stack of spans: [B, g, p + n, d] each."""
        batch, n = stack.rows.shape
        found = []
        for before, new in zip(self.layers[layer], (key, value), strict=True):
            groups, p, d = before.shape
            own = new.view(groups, batch, n, d).transpose(0, 1)
            found.append(torch.cat([before.expand(batch, groups, p, d), own], 2))
        return found[0], found[1]

    def attend(self, *args: Any, **kwargs: Any) -> None:
        """No kernel reads a prefix that lies apart."""


def behind(ids: Tensor, lengths: Sequence[int], shared: int) -> Tensor:
    """The tokens of a packed row [T] without the first `shared` of each document."""
    documents = ids.split(list(lengths))
    assert all(torch.equal(d[:shared], documents[0][:shared]) for d in documents)
    return torch.cat([document[shared:] for document in documents])


def join(prefix: Tensor, own: Tensor, lengths: Sequence[int], shared: int) -> Tensor:
    """States of whole documents [T, ...] from those of the prefix [p, ...] and of the rest."""
    parts = own.split([n - shared for n in lengths])
    return torch.cat([states for part in parts for states in (prefix, part)])


def shared_length(first: list[int], last: list[int], shortest: int) -> int:
    """How many tokens all documents share, given the lexicographically first and last of them.

    At least one token of the shortest is left to itself; a handful is not worth a special case: 0.
    """
    most = min(len(first), len(last), shortest - 1)
    same = next((i for i in range(most) if first[i] != last[i]), most)
    return same if same >= 8 else 0
