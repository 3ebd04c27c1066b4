"""Which new tokens belong to which request, where they go in the cache, and who sees whom.

Shapes: T new tokens of all requests, n of one request, P cached prefix, g key/value heads, d head
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The `length` new tokens of one request, behind `start` tokens of `slot` in the cache that all
    of them see.

    For a draft tree `ancestors` [n, e + n] bool marks, for each new node, the nodes that it may see
    (itself included): e of them were cached behind `start` by earlier passes, n are new. `depths`
    int64 [e + n] are their distances from `start` (position = start + depth). None for both is the
    causal order of a chain.
    """

    length: int
    start: int = 0
    slot: int = 0
    ancestors: Tensor | None = None
    depths: Tensor | None = None

    @property
    def offset(self) -> int:
        """Where in its slot the first new token is stored."""
        return (
            self.start
            if self.ancestors is None
            else self.start + self.ancestors.shape[1] - self.length
        )

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Positions of the new tokens, int64 [n]."""
        if self.depths is None:
            return torch.arange(self.start, self.start + self.length, device=device)
        return self.start + self.depths[-self.length :].to(device)


@dataclass(frozen=True, slots=True)
class Stack:
    """B spans of one length n, to attend in one call. Made once a pass, read by every layer.

    Their slots int64 [B], the cache rows of their tokens int64 [B, n], and who sees whom up to the
    longest end, once for each query head of a group: mask bool [B, 1, groups * n, end]. `ordered`
    when the slots are 0..B-1.
    """

    slots: Tensor
    rows: Tensor
    mask: Tensor
    ordered: bool

    @classmethod
    def of(
        cls, spans: Sequence[Span], window: int | None, groups: int, device: torch.device
    ) -> "Stack":
        """Stack spans of equal length."""
        n, end = spans[0].length, max(span.offset + span.length for span in spans)
        mask = torch.zeros(len(spans), 1, n, end, dtype=torch.bool, device=device)
        for row, span in zip(mask, spans, strict=True):
            total = span.offset + n
            seen = visible(span, total, window, device)
            # None means causal order, which for a single token is to see everything.
            causal = torch.ones(n, total, dtype=torch.bool, device=device).tril(total - n)
            row[0, :, :total] = causal if seen is None else seen
        slots = [span.slot for span in spans]
        offsets = torch.tensor([[span.offset] for span in spans], device=device)
        return cls(
            torch.tensor(slots, device=device),
            offsets + torch.arange(n, device=device),
            mask.repeat(1, 1, groups, 1),
            slots == list(range(len(spans))),
        )


class KeyValueStore(Protocol):
    """What attention needs of a cache: store new keys and values, give back the whole prefixes; or
    attend by itself (`attend`), where it has a kernel for these spans. That returns None, with
    nothing stored, where it leaves the work to the caller.
    """

    def extend(
        self, layer: int, span: Span, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def extend_all(
        self, layer: int, stack: Stack, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def attend(
        self,
        layer: int,
        spans: Sequence[Span],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | None: ...


def positions_of(spans: Sequence[Span], device: torch.device | str = "cpu") -> Tensor:
    """Positions of every new token, int64 [T]."""
    return torch.cat([span.positions(device) for span in spans])


def visible(span: Span, total: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask bool [n, total] of one span; None is plain causal order from an empty prefix, or
    sees everything.
    """
    n = span.length
    limit = window if window is not None and total > window else None
    if span.ancestors is None and limit is None and (total == n or n == 1):
        return None
    if span.ancestors is None:
        tail = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    else:
        tail = span.ancestors.to(device)
    prefix = total - tail.shape[1]
    mask = torch.cat([torch.ones(n, prefix, dtype=torch.bool, device=device), tail], dim=1)
    if limit is not None:
        behind = torch.arange(n, device=device) if span.depths is None else span.depths.to(device)
        seen = torch.cat(
            [torch.arange(span.start - prefix, span.start, device=device), span.start + behind]
        )
        mask &= span.positions(device)[:, None] - seen[None, :] < limit
    return mask


class Masks:
    """Who sees whom among the spans of one pass: made at the first layer that asks, read by all.

    The query heads of a group stand as `groups` times the rows, as attention packs them.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._spans, self._device = spans, device
        self._stacks: dict[tuple[int | None, int], Stack] = {}
        self._masks: dict[tuple[int, int, int | None, int, bool], Tensor | None] = {}

    def stack(self, window: int | None, groups: int) -> Stack:
        """All spans, which are of one length."""
        if (window, groups) not in self._stacks:
            stack = Stack.of(self._spans, window, groups, self._device)
            self._stacks[window, groups] = stack
        return self._stacks[window, groups]

    def of(
        self, index: int, total: int, window: int | None, groups: int, last_only: bool
    ) -> Tensor | None:
        """bool [groups * n, total] of one span, or of its last token [groups, total]; None as
        `visible` says.
        """
        wanted = (index, total, window, groups, last_only)
        if wanted not in self._masks:
            mask = visible(self._spans[index], total, window, self._device)
            if mask is not None:
                mask = (mask[-1:] if last_only else mask).repeat(groups, 1)
            self._masks[wanted] = mask
        return self._masks[wanted]
