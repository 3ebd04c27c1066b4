"""The new tokens of a pass as the attention kernel reads them: one small table on the device.

Shapes: B requests, T new tokens of all, n of one, e + n of its tail (everything behind the prefix
that all new tokens see: earlier draft nodes and the new ones), W words of 64 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headsmith.models.spans import Span

# slot, start, first row, n, e + n, first depth, 1 for causal order.
FIELDS = 7
# Where a prefix is cut into twice as many parts. The number of parts depends on nothing but its
# length, so a token's state does not change with the number of nodes beside it.
CUTS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` int32 [B, FIELDS]; `owner` int32 [T] the request of each new token, `rows` int64
    [T] its row in its slot, `slots` int64 [T] that slot; `words` int64 [T, W] the tail's nodes that
    it sees, one bit each, where the order is not causal; `depths` int32 the distances of all tail
    nodes from their start, request by request. `longest` is the largest n, `prefix` the largest
    start.
    """

    requests: Tensor
    owner: Tensor
    slots: Tensor
    rows: Tensor
    words: Tensor
    depths: Tensor
    longest: int
    prefix: int

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "Plan":
        """Lay out the spans of one pass."""
        tails = [_tail(span) for span in spans]
        width = max(-(-tail // 64) for tail in tails)
        table, begin, deep = [], 0, 0
        for span, tail in zip(spans, tails, strict=True):
            causal = int(span.ancestors is None)
            table.append([span.slot, span.start, begin, span.length, tail, deep, causal])
            begin, deep = begin + span.length, deep + tail
        lengths = torch.tensor([span.length for span in spans])
        return cls(
            torch.tensor(table, dtype=torch.int32).to(device),
            torch.arange(len(spans)).repeat_interleave(lengths).int().to(device),
            torch.tensor([span.slot for span in spans]).repeat_interleave(lengths).to(device),
            torch.cat([s.offset + torch.arange(s.length) for s in spans]).to(device),
            torch.cat([_words(span, width) for span in spans]).to(device),
            torch.cat([_depths(span) for span in spans]).int().to(device),
            max(span.length for span in spans),
            max(span.start for span in spans),
        )

    @classmethod
    def even(
        cls, slots: Tensor, starts: Tensor, depths: Tensor, words: Tensor | None, prefix: int
    ) -> "Plan":
        """B requests of n new tokens each behind e earlier draft nodes, laid out by the device.

        slots and starts int64 [B]; depths int64 [B, e + n] of the tail from its start; words int64
        [B, n, W], None for causal order (e is 0 then). No prefix is longer than `prefix`.
        """
        (batch, tail), device = depths.shape, slots.device
        n = tail if words is None else words.shape[1]
        order = torch.arange(batch, device=device)
        same = torch.zeros_like(order)
        causal = int(words is None)
        table = [slots, starts, order * n, same + n, same + tail, order * tail, same + causal]
        rows = (starts + tail - n)[:, None] + torch.arange(n, device=device)
        if words is None:
            words = torch.zeros(batch, n, 1, dtype=torch.int64, device=device)
        return cls(
            torch.stack(table, 1).int(),
            # Kernels read memory, so nothing may be a view that repeats one number.
            order.int()[:, None].repeat(1, n).flatten(),
            slots[:, None].repeat(1, n).flatten(),
            rows.flatten(),
            words.flatten(0, 1).contiguous(),
            depths.int().contiguous().flatten(),
            n,
            prefix,
        )

    def visible(self, request: int) -> Tensor:
        """Which tail nodes the new tokens of a request see: bool [n, e + n]."""
        _, _, begin, n, tail, _, causal = self.requests[request].tolist()
        if causal:
            return torch.ones(n, tail, dtype=torch.bool, device=self.words.device).tril(tail - n)
        bits = torch.arange(64, device=self.words.device)
        return ((self.words[begin : begin + n, :, None] >> bits) & 1).bool().flatten(1)[:, :tail]


def words_of(seen: Tensor) -> Tensor:
    """Marks bool [..., e + n] as bits, int64 [..., W]; bit 63 is the sign."""
    width = -(-seen.shape[-1] // 64)
    bits = F.pad(seen.long(), (0, width * 64 - seen.shape[-1])).unflatten(-1, (width, 64))
    return (bits << torch.arange(64, device=seen.device)).sum(-1)


def parts_of(prefix: int) -> int:
    """Into how many parts a prefix of that length is cut: 1, 2, 4, ... 32."""
    return 1 << sum(prefix >= cut for cut in CUTS)


def _tail(span: Span) -> int:
    return span.length if span.ancestors is None else span.ancestors.shape[1]


def _depths(span: Span) -> Tensor:
    return torch.arange(span.length) if span.depths is None else span.depths.cpu()


def _words(span: Span, width: int) -> Tensor:
    """Ancestors as bits, int64 [n, W]. Zeros for causal order."""
    seen = torch.zeros(span.length, width * 64, dtype=torch.bool)
    if span.ancestors is not None:
        seen[:, : span.ancestors.shape[1]] = span.ancestors.cpu()
    return words_of(seen)
