"""Keys and values of every request, each in its own slot: no padding, no re-packing, stale rows
simply overwritten.
"""

import torch
from torch import Tensor

from headsmith.models.spans import Span, Stack


class KeyValueCache:
    """`slots` requests of up to `capacity` tokens; each layer's [slots, g, capacity, d] is made at
    its first use.

    The cache knows no lengths: a span says where its tokens go, and what lies behind the last of
    them is stale.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def extend(self, layer: int, span: Span, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [g, n, d] and value [g, n, d_v] of a span; returns all up to its end, [g, P +
        n, d] each.
        """
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
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
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
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

    def keep(self, slot: int, start: int, nodes: list[int]) -> None:
        """Move the tree nodes behind `start` that were accepted to the consecutive rows start,
        start + 1, ...
        """
        if nodes == list(range(len(nodes))):
            return
        for store in (store for pair in self._layers.values() for store in pair):
            index = torch.tensor(nodes, device=store.device) + start
            # Indexing copies before it writes, so source and destination may overlap.
            store[slot, :, start : start + len(nodes)] = store[slot, :, index]

    def _empty(self, like: Tensor) -> Tensor:
        groups, _, d = like.shape
        # Zeros, for stacked attention multiplies stale rows by zero, and garbage may be NaN.
        return like.new_zeros(self.slots, groups, self.capacity, d)
