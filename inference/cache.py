"""Keys and values of every request, each in its own slot: no padding, no re-packing, stale rows
simply overwritten.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from headsmith.inference.kernels import use_kernels
from headsmith.inference.kernels.compaction import Stores, compact
from headsmith.inference.kernels.plan import Plan
from headsmith.inference.kernels.tree_attention import tree_attention
from headsmith.models.spans import Span, Stack

# Longer spans are prompts, whose attention is bound by arithmetic: torch's own kernels are better.
LONGEST = 128


class KeyValueCache:
    """`slots` requests of up to `capacity` tokens; each layer's [slots, g, capacity, d] is made at
    its first use.

    The cache knows no lengths: a span says where its tokens go, and what lies behind the last of
    them is stale.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._plan: tuple[Sequence[Span], Plan] | None = None
        self._following: Plan | None = None
        self._stores: list[Stores] = []

    def fitting(self, slots: int, capacity: int) -> "KeyValueCache":
        """This cache if it has so many slots and room enough, else a new one."""
        fits = slots == self.slots and capacity <= self.capacity
        return self if fits else KeyValueCache(slots, capacity)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def extend(self, layer: int, span: Span, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [g, n, d] and value [g, n, d_v] of a span; returns all up to its end, [g, P +
        n, d] each.
        """
        self._make(layer, key, value)
        begin, end = span.offset, span.offset + span.length
        assert end <= self.capacity, f"slot of {self.capacity} tokens cannot hold {end}"
        keys, values = (store[span.slot] for store in self._layers[layer])
        keys[:, begin:end], values[:, begin:end] = key, value
        return keys[:, :end], values[:, :end]

    def extend_all(
        self, layer: int, stack: Stack, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store key [g, B * n, d] of a stack; returns all rows up to the longest end,
        [B, g, end, d] each.
        """
        self._make(layer, key, value)
        batch, n = stack.rows.shape
        end = stack.mask.shape[-1]
        assert end <= self.capacity, f"slots of {self.capacity} tokens cannot hold {end}"
        found = []
        for store, new in zip(self._layers[layer], (key, value), strict=True):
            store[stack.slots[:, None], :, stack.rows] = new.view(
                new.shape[0], batch, n, -1
            ).permute(1, 2, 0, 3)
            whole = stack.ordered and batch == self.slots
            found.append(store[:, :, :end] if whole else store[stack.slots, :, :end])
        return found[0], found[1]

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
    ) -> Tensor | None:
        """Store key [g, T, d] and value [g, T, d_v] of all spans and attend by the kernel, where
        there is one for them: query [h, T, d] -> [h, T, d_v]. Within `following` its plan says
        where they go, and no spans are needed.
        """
        plan = self._following or self._plan_of(spans, query)
        if plan is None:
            return None
        self.store(layer, plan.slots, plan.rows, key, value)
        return tree_attention(
            query,
            *self._layers[layer],
            plan,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def _plan_of(self, spans: Sequence[Span], query: Tensor) -> Plan | None:
        """How the kernel would attend over these spans; None where it is not for them."""
        small = max(span.length for span in spans) <= LONGEST
        if not small or query.dtype == torch.float64 or not use_kernels(query.device):
            return None
        end = max(span.offset + span.length for span in spans)
        assert end <= self.capacity, f"slots of {self.capacity} tokens cannot hold {end}"
        # One pass has one list of spans, which all its layers read.
        if self._plan is None or self._plan[0] is not spans:
            self._plan = (spans, Plan.of(spans, query.device))
        return self._plan[1]

    @contextmanager
    def following(self, plan: Plan) -> Iterator[None]:
        """The passes within this block are those of a plan that lies on the device already."""
        self._following = plan
        try:
            yield
        finally:
            self._following = None

    def store(self, layer: int, slots: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys [g, T, d] and values [g, T, d_v] go to their slots and rows, int64 [T] each."""
        self._make(layer, key, value)
        keys, values = self._layers[layer]
        keys[slots, :, rows] = key.transpose(0, 1)
        values[slots, :, rows] = value.transpose(0, 1)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that is in use, [slots, g, capacity, d] each."""
        return self._layers[layer]

    def clear(self, slot: int) -> None:
        """Zeros in all rows of a slot."""
        for pair in self._layers.values():
            for store in pair:
                store[slot] = 0

    def keep(self, slot: int, start: int, nodes: list[int]) -> None:
        """Move the tree nodes behind `start` that were accepted to the consecutive rows start,
        start + 1, ...
        """
        self.keep_all([(slot, start, nodes)])

    def keep_all(self, moves: Sequence[tuple[int, int, list[int]]]) -> None:
        """The same for several requests at once: slot, start and nodes of each."""
        moves = [move for move in moves if move[2] != list(range(len(move[2])))]
        if not moves:
            return
        longest = max(len(nodes) for _, _, nodes in moves)
        table = [
            [slot, start, len(nodes), *nodes, *[0] * (longest - len(nodes))]
            for slot, start, nodes in moves
        ]
        device = next(iter(self._layers.values()))[0].device
        rows = torch.tensor(table, dtype=torch.int32, device=device)
        slots, starts, counts = (column.contiguous() for column in rows[:, :3].unbind(1))
        self.compact(slots, starts, rows[:, 3:].contiguous(), counts)

    def compact(self, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
        """The same from tables on the device, as inference/kernels/compaction.py has them."""
        if not self._stores:
            self._stores = Stores.of([store for pair in self._layers.values() for store in pair])
        for stores in self._stores:
            compact(stores, slots, starts, paths, counts)

    def _make(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The two stores of a layer, at its first use."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
            self._stores = []

    def _empty(self, like: Tensor) -> Tensor:
        groups, _, d = like.shape
        # Zeros, for stacked attention multiplies stale rows by zero, and garbage may be NaN.
        return like.new_zeros(self.slots, groups, self.capacity, d)
