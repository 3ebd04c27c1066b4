"""Ragged attention against a dense mask and a softmax written out, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headsmith.inference.cache import KeyValueCache
from headsmith.models import attention
from headsmith.models.attention import ragged_attention
from headsmith.models.spans import Span, positions_of

D = 8


def filled(prefixes: Sequence[int], capacity: int = 24) -> KeyValueCache:
    """A cache whose slots hold that many random rows, and garbage behind them."""
    cache = KeyValueCache(len(prefixes), capacity)
    garbage = torch.full((2, capacity, D), 1e6, dtype=torch.float64)
    for slot, prefix in enumerate(prefixes):
        cache.extend(0, Span(capacity, 0, slot), garbage, garbage)
        old = random(2, prefix, D, seed=slot), random(2, prefix, D, seed=100 + slot)
        cache.extend(0, Span(prefix, 0, slot), *old)
    return cache


def held(cache: KeyValueCache, slot: int, end: int) -> tuple[Tensor, Tensor]:
    """The first `end` rows of a slot."""
    empty = torch.empty(2, 0, D, dtype=torch.float64)
    keys, values = cache.extend(0, Span(0, end, slot), empty, empty)
    return keys.clone(), values.clone()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [h, n, d], keys [g, P, d], mask bool [n, P]: one query at a time."""
    group = query.shape[0] // keys.shape[0]
    out = torch.zeros(query.shape[0], query.shape[1], values.shape[-1], dtype=query.dtype)
    for head in range(query.shape[0]):
        for row in range(query.shape[1]):
            seen = mask[row].nonzero().flatten()
            scores = keys[head // group, seen] @ query[head, row] / math.sqrt(D)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].exp())
            out[head, row] = (weights / total) @ values[head // group, seen]
    return out


def causal(prefix: int, n: int, window: int | None = None) -> Tensor:
    rows, columns = torch.arange(prefix, prefix + n)[:, None], torch.arange(prefix + n)[None]
    mask = columns <= rows
    return mask if window is None else mask & (rows - columns < window)


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [[4, 1, 3, 6, 1], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1]])
def test_ragged_spans_equal_a_dense_mask(
    groups: int, window: int | None, lengths: list[int]
) -> None:
    prefixes = [0, 1, 5, 9, 0]
    cache = filled(prefixes)
    q, k, v = (random(h, sum(lengths), D, seed=7 + h) for h in (2 * groups, 2, 2))
    spans = [Span(n, p, s) for s, (n, p) in enumerate(zip(lengths, prefixes, strict=True))]
    got = ragged_attention(q, k, v, spans, cache=cache, window=window)
    begin = 0
    for slot, (prefix, n) in enumerate(zip(prefixes, lengths, strict=True)):
        keys, values = held(cache, slot, prefix + n)
        expected = dense(q[:, begin : begin + n], keys, values, causal(prefix, n, window))
        torch.testing.assert_close(got[:, begin : begin + n], expected, rtol=0, atol=1e-12)
        begin += n


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("prefix", [0, 4])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_softcap_and_sinks(
    softcap: float | None,
    with_sinks: bool,
    prefix: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many rows of scores exist at a time."""
    monkeypatch.setattr(attention, "SCORES", rows * 6 * (prefix + 5))
    sinks = random(6, seed=3) if with_sinks else None
    cache = filled([prefix])
    q, k, v = random(6, 5, D, seed=4), random(2, 5, D, seed=5), random(2, 5, D, seed=6)
    spans = [Span(5, prefix)]
    got = ragged_attention(q, k, v, spans, cache=cache, softcap=softcap, sinks=sinks)
    expected = dense(q, *held(cache, 0, prefix + 5), causal(prefix, 5), softcap, sinks)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_packed_documents_do_not_see_each_other() -> None:
    q, k, v = (random(4, 9, D, seed=i) for i in range(3))
    got = ragged_attention(q, k, v, [Span(2), Span(1), Span(6)])
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        part = slice(begin, end)
        alone = ragged_attention(q[:, part], k[:, part], v[:, part], [Span(end - begin)])
        torch.testing.assert_close(got[:, part], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 3])
def test_last_only_is_the_last_row_of_each_span(window: int | None) -> None:
    lengths, prefixes = [4, 1, 7], [0, 6, 2]
    spans = [Span(n, p, s) for s, (n, p) in enumerate(zip(lengths, prefixes, strict=True))]
    caches = filled(prefixes), filled(prefixes)
    q, k, v = random(6, 12, D, seed=20), random(2, 12, D, seed=21), random(2, 12, D, seed=22)
    whole = ragged_attention(q, k, v, spans, cache=caches[0], window=window)
    last = torch.tensor([3, 4, 11])
    got = ragged_attention(q[:, last], k, v, spans, cache=caches[1], window=window, last_only=True)
    torch.testing.assert_close(got, whole[:, last], rtol=0, atol=1e-13)


PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
DEPTHS = [0, 1, 1, 2, 2, 2, 3, 3, 4]


def closure(parents: list[int]) -> Tensor:
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("prefix", [0, 1, 6])
@pytest.mark.parametrize("window", [None, 2, 4])
def test_each_tree_node_sees_the_prefix_and_its_own_path(
    groups: int, prefix: int, window: int | None
) -> None:
    """A node equals the last row of a plain chain over prefix + its path, at every depth."""
    n = len(PARENTS)
    cache = filled([prefix])
    old = held(cache, 0, prefix)
    q, k, v = random(2 * groups, n, D, seed=3), random(2, n, D, seed=4), random(2, n, D, seed=5)
    span = Span(n, prefix, 0, closure(PARENTS), torch.tensor(DEPTHS))
    assert span.offset == prefix
    assert positions_of([span]).tolist() == [prefix + d for d in DEPTHS]
    got = ragged_attention(q, k, v, [span], cache=cache, window=window)
    for node in range(n):
        path = closure(PARENTS)[node].nonzero().flatten()
        keys, values = torch.cat([old[0], k[:, path]], 1), torch.cat([old[1], v[:, path]], 1)
        mask = causal(0, keys.shape[1], window)[-1:]
        expected = dense(q[:, node : node + 1], keys, values, mask)
        torch.testing.assert_close(got[:, node : node + 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_that_grows_level_by_level_equals_the_whole_tree(window: int | None) -> None:
    """Nodes of earlier levels stay cached behind `start`; the span's offset steps over them."""
    n, prefix = len(PARENTS), 3
    q, k, v = random(6, n, D, seed=3), random(2, n, D, seed=4), random(2, n, D, seed=5)
    whole, grown = filled([prefix]), filled([prefix])
    seen, depths = closure(PARENTS), torch.tensor(DEPTHS)
    tree = Span(n, prefix, 0, seen, depths)
    expected = ragged_attention(q, k, v, [tree], cache=whole, window=window)
    for depth in range(max(DEPTHS) + 1):
        nodes = (depths == depth).nonzero().flatten()
        first, last = int(nodes[0]), int(nodes[-1]) + 1
        span = Span(last - first, prefix, 0, seen[first:last, :last], depths[:last])
        assert span.offset == prefix + first
        part = slice(first, last)
        got = ragged_attention(
            q[:, part], k[:, part], v[:, part], [span], cache=grown, window=window
        )
        torch.testing.assert_close(got, expected[:, part], rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window", [None, 3])
def test_trees_of_several_requests_keep_to_their_own_slots(groups: int, window: int | None) -> None:
    """Equal and unequal trees in one call give what each gives alone, slots in any order."""
    n, prefixes, order = len(PARENTS), [6, 0, 3], [2, 0, 1]
    chain = closure(list(range(-1, n - 1)))
    shapes = [(closure(PARENTS), torch.tensor(DEPTHS)), (chain, torch.arange(n)), (None, None)]
    spans = [Span(n, prefixes[slot], slot, *shapes[slot]) for slot in order]
    total = n * len(spans)
    q, k, v = random(2 * groups, total, D, seed=3), *(random(2, total, D, seed=i) for i in (4, 5))
    got = ragged_attention(q, k, v, spans, cache=filled(prefixes), window=window)
    for i, span in enumerate(spans):
        part = slice(i * n, (i + 1) * n)
        alone = ragged_attention(
            q[:, part], k[:, part], v[:, part], [span], cache=filled(prefixes), window=window
        )
        torch.testing.assert_close(got[:, part], alone, rtol=0, atol=1e-12)


def test_positions_go_on_behind_the_prefix() -> None:
    assert positions_of([Span(3), Span(2, 5, 1)]).tolist() == [0, 1, 2, 5, 6]
