"""Slots of the cache: where tokens go, and moving accepted nodes onto consecutive rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headsmith.inference.cache import KeyValueCache
from headsmith.models.spans import Span, Stack

SLOTS, CAPACITY, G, D = 3, 12, 2, 4


def numbered(first: int, count: int, width: int = D) -> Tensor:
    """Row i holds the value first + i everywhere."""
    return torch.arange(first, first + count, dtype=torch.float)[None, :, None].expand(
        G, count, width
    )


def stored(cache: KeyValueCache, slot: int, end: int, layer: int = 0) -> list[float]:
    empty = torch.empty(G, 0, D)
    keys, values = cache.extend(layer, Span(0, end, slot), empty, empty)
    assert torch.equal(keys, values)
    assert (keys == keys[:1, :, :1]).all()
    return keys[0, :, 0].tolist()


def test_spans_go_on_in_their_own_slots() -> None:
    cache = KeyValueCache(SLOTS, CAPACITY)
    assert cache.nbytes == 0
    cache.extend(0, Span(3, 0, 1), numbered(10, 3), numbered(10, 3))
    cache.extend(0, Span(2, 0, 2), numbered(20, 2), numbered(20, 2))
    keys, values = cache.extend(0, Span(2, 3, 1), numbered(13, 2), numbered(13, 2))
    assert keys.shape == values.shape == (G, 5, D)
    assert stored(cache, 1, 5) == [10, 11, 12, 13, 14]
    assert stored(cache, 2, 2) == [20, 21]
    assert cache.nbytes == 2 * SLOTS * G * CAPACITY * D * 4


def test_stale_rows_are_overwritten() -> None:
    cache = KeyValueCache(1, CAPACITY)
    cache.extend(0, Span(6), numbered(0, 6), numbered(0, 6))
    cache.extend(0, Span(2, 3), numbered(50, 2), numbered(50, 2))
    assert stored(cache, 0, 5) == [0, 1, 2, 50, 51]


def test_layers_and_widths_are_apart() -> None:
    cache = KeyValueCache(1, CAPACITY)
    cache.extend(0, Span(2), numbered(0, 2), numbered(0, 2))
    keys, values = cache.extend(3, Span(2), numbered(7, 2), numbered(9, 2, width=6))
    assert keys.shape == (G, 2, D) and values.shape == (G, 2, 6)
    assert stored(cache, 0, 2) == [0, 1]


def test_a_stack_stores_what_spans_would() -> None:
    one, all_ = KeyValueCache(SLOTS, CAPACITY), KeyValueCache(SLOTS, CAPACITY)
    for slot, prefix in enumerate([4, 0, 2]):
        for cache in (one, all_):
            old = numbered(10 * slot, prefix)
            cache.extend(0, Span(prefix, 0, slot), old, old)
    spans = [Span(2, 2, 2), Span(2, 4, 0)]
    new = numbered(90, 4)
    for i, span in enumerate(spans):
        one.extend(0, span, new[:, 2 * i : 2 * i + 2], new[:, 2 * i : 2 * i + 2])
    stack = Stack.of(spans, None, 1, torch.device("cpu"))
    keys, values = all_.extend_all(0, stack, new, new)
    assert keys.shape == values.shape == (2, G, 6, D)
    assert keys[0, 0, :4, 0].tolist() == [20, 21, 90, 91]
    assert keys[1, 0, :, 0].tolist() == [0, 1, 2, 3, 92, 93]
    for slot, end in ((0, 6), (2, 4)):
        assert stored(all_, slot, end) == stored(one, slot, end)


@pytest.mark.parametrize(
    "nodes", [[0], [0, 1, 2], [0, 2], [0, 3, 5], [0, 2, 3, 4], [0, 1, 4, 6], [0, 6]]
)
def test_keep_moves_accepted_nodes_together(nodes: list[int]) -> None:
    """Source and destination overlap; other rows and other slots stay."""
    cache = KeyValueCache(SLOTS, CAPACITY)
    for layer in (0, 1):
        for slot in range(SLOTS):
            rows = numbered(100 * slot, 10)
            cache.extend(layer, Span(10, 0, slot), rows, rows)
    cache.keep(1, 3, nodes)
    for layer in (0, 1):
        expected = [100, 101, 102, *(103 + n for n in nodes)]
        assert stored(cache, 1, 3 + len(nodes), layer) == expected
        for slot in (0, 2):
            assert stored(cache, slot, 10, layer) == [100 * slot + i for i in range(10)]


def test_a_span_beyond_the_slot_is_our_own_fault() -> None:
    cache = KeyValueCache(1, 4)
    with pytest.raises(AssertionError, match="slot of 4 tokens cannot hold 5"):
        cache.extend(0, Span(2, 3), numbered(0, 2), numbered(0, 2))
