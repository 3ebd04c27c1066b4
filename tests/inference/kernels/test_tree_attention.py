"""Tree attention: kernel and reference against every score written out in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from headsmith.inference.kernels.plan import CUTS, Plan, parts_of
from headsmith.inference.kernels.tree_attention import reference, tree_attention
from headsmith.models.spans import Span, visible

CPU = torch.device("cpu")


def chain(start: int, length: int, slot: int) -> Span:
    return Span(length, start, slot)


def tree(start: int, earlier: int, nodes: int, slot: int) -> Span:
    """A random tree of nodes, `earlier` of which older passes have cached."""
    chooser = random.Random(1000 * start + nodes)
    total = earlier + nodes
    seen, depths = torch.eye(total, dtype=torch.bool), [0] * total
    for node in range(1, total):
        parent = chooser.randrange(node)
        seen[node] |= seen[parent]
        depths[node] = depths[parent] + 1
    return Span(nodes, start, slot, seen[earlier:], torch.tensor(depths))


@dataclass
class Case:
    """Random tensors for some spans; the rows of the cache that hold nothing are NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    spans: Sequence[Span]

    @classmethod
    def of(cls, spans: Sequence[Span], group: int, d: int, heads: int = 2, dv: int = 0) -> Case:
        generator = torch.Generator().manual_seed(len(spans) + d)
        tokens, slots = sum(s.length for s in spans), 1 + max(s.slot for s in spans)
        capacity = 3 + max(s.offset + s.length for s in spans)
        keys = torch.full((slots, heads, capacity, d), float("nan"))
        values = torch.full((slots, heads, capacity, dv or d), float("nan"))
        for span in spans:
            end = span.offset + span.length
            for store in (keys, values):
                store[span.slot, :, :end] = torch.randn(
                    heads, end, store.shape[-1], generator=generator
                )
        # As a model hands it over: heads inside rows.
        query = torch.randn(tokens, group * heads, d, generator=generator).transpose(0, 1)
        return cls(query, keys, values, spans)

    def to(self, dtype: torch.dtype) -> Case:
        query = self.query.transpose(0, 1).to(dtype).transpose(0, 1)
        return Case(query, self.keys.to(dtype), self.values.to(dtype), self.spans)

    def run(self, function: Callable[..., Tensor], **options: object) -> Tensor:
        plan = Plan.of(self.spans, CPU)
        return function(self.query, self.keys, self.values, plan, **options)


def exact(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """float64, from the spans themselves: no plan, no bits."""
    query, keys, values = (t.double() for t in (case.query, case.keys, case.values))
    group, outputs, begin = query.shape[0] // keys.shape[1], [], 0
    for span in case.spans:
        n, end = span.length, span.offset + span.length
        seen = visible(span, end, window, CPU)
        if seen is None:
            seen = torch.ones(n, end, dtype=torch.bool).tril(end - n)
        mine = keys[span.slot, :, :end].repeat_interleave(group, 0)
        scores = query[:, begin : begin + n] @ mine.transpose(1, 2)
        scores = scores * (scale or query.shape[-1] ** -0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp() * seen
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None, None]
        outputs.append(weights / total @ values[span.slot, :, :end].repeat_interleave(group, 0))
        begin += n
    return torch.cat(outputs, 1)


RAGGED = {
    "long prefixes, heads alone": ([tree(3000, 0, 4, 1), chain(0, 1, 0), chain(511, 3, 2)], 1, 64),
    "64 nodes, groups of 3": ([tree(512, 0, 9, 0), chain(1, 7, 2), tree(0, 0, 64, 1)], 3, 64),
    "two parts, groups of 4": ([tree(2048, 0, 5, 0), tree(63, 10, 20, 1)], 4, 128),
    "two words of bits, groups of 8": (
        [tree(31, 0, 1, 3), chain(32, 3, 0), tree(33, 70, 33, 1)],
        8,
        96,
    ),
    "61 nodes, groups of 4": ([tree(200, 0, 61, 0)], 4, 96),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RAGGED)
def test_kernel_and_reference_give_the_exact_result(
    name: str, no_worse: Callable[..., None]
) -> None:
    spans, group, d = RAGGED[name]
    case = Case.of(spans, group, d, heads=1 if group > 3 else 2)
    truth = exact(case)
    torch.testing.assert_close(case.to(torch.double).run(reference), truth, atol=1e-12, rtol=0)
    found = case.run(tree_attention)
    assert found.shape == truth.shape
    torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=0)
    half = case.to(torch.bfloat16)
    no_worse(half.run(tree_attention), half.run(reference), exact(half))


LIMITS = {
    "window": {"window": 5},
    "window longer than the prefix": {"window": 70},
    "window of one": {"window": 1},
    "soft cap": {"softcap": 2.0},
    "soft cap, window": {"softcap": 30.0, "window": 40},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", LIMITS)
def test_window_soft_cap_and_scale(name: str) -> None:
    case = Case.of([tree(45, 3, 12, 1), chain(33, 5, 0), chain(0, 4, 2)], 3, 16)
    truth = exact(case, **LIMITS[name])
    options = LIMITS[name]
    torch.testing.assert_close(case.run(tree_attention, **options).double(), truth, **CLOSE)
    torch.testing.assert_close(case.to(torch.double).run(reference, **options), truth, **CLOSE)


def test_sinks_and_values_of_another_width() -> None:
    case = Case.of([tree(45, 0, 6, 0), chain(0, 1, 1)], 2, 16, dv=24)
    sinks = torch.tensor([0.0, 2.0, -1.0, 5.0])
    truth = exact(case, sinks=sinks)
    torch.testing.assert_close(case.run(tree_attention, sinks=sinks).double(), truth, **CLOSE)
    found = case.to(torch.double).run(reference, sinks=sinks.double())
    torch.testing.assert_close(found, truth, **CLOSE)


CLOSE = {"atol": 1e-5, "rtol": 0.0}

# What a wrong kernel looks like, and that the tests above would see it.
WRONG = {
    "causal mask off by one": (
        "<= (tail - length + node)[:, None]",
        "<= (tail - length + node + 1)[:, None]",
    ),
    "ancestor bits off by one": ("(column % 64)", "((column + 1) % 64)"),
    "second word of bits not read": ("token * WORDS + j // 64", "token * WORDS"),
    "a stale row behind the tail is read": ("inside = column < tail", "inside = column < tail + 1"),
    "the edge of a part belongs to both": ("inside = column < until", "inside = column <= until"),
    "the edge of a part belongs to none": (
        "range(low + part * size, until",
        "range(low + part * size + 1, until",
    ),
    "window off by one": ("column[None, :] < window", "column[None, :] <= window"),
    "window off by one among the nodes": ("their[None, :] < window", "their[None, :] <= window"),
    "earlier sums not faded": ("total = total * fade", "total = total"),
    "heads of a group interleaved wrongly": ("row % GROUP).to", "row % GROUP * 0).to"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught(
    name: str,
    mutant: Callable[[ModuleType, str, str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headsmith.inference.kernels import tree_attention_launch, tree_attention_triton

    case = Case.of([tree(549, 0, 5, 1), chain(45, 5, 0), tree(33, 60, 10, 2)], 2, 16, heads=1)
    options = {"window": 3} if "window" in name else {}
    truth = exact(case, **options)
    torch.testing.assert_close(case.run(tree_attention, **options).double(), truth, **CLOSE)
    wrong = mutant(tree_attention_triton, *WRONG[name])
    monkeypatch.setattr(tree_attention_launch, "part_kernel", wrong.part_kernel)
    found = case.run(tree_attention, **options).double()
    assert not torch.allclose(found, truth, atol=1e-3)


def test_a_row_does_not_change_with_the_nodes_beside_it() -> None:
    """Bit for bit, over a prefix of several parts: splits follow its length alone."""
    whole = Case.of([tree(600, 0, 11, 0)], 2, 16)
    found = whole.run(tree_attention)
    span = whole.spans[0]
    assert span.ancestors is not None and span.depths is not None
    first = Span(1, 600, 0, span.ancestors[:1, :1], span.depths[:1])
    alone = Case(whole.query[:, :1], whole.keys, whole.values, [first])
    assert torch.equal(alone.run(tree_attention), found[:, :1])


def test_a_plan_keeps_every_bit() -> None:
    spans = [tree(9, 61, 70, 1), chain(4, 6, 0)]
    plan = Plan.of(spans, CPU)
    assert plan.words.shape == (76, 3)
    assert torch.equal(plan.visible(0), spans[0].ancestors)
    assert torch.equal(plan.visible(1), torch.ones(6, 6).tril().bool())
    assert plan.rows[:2].tolist() == [70, 71] and plan.rows[-2:].tolist() == [8, 9]
    assert plan.slots.unique_consecutive().tolist() == [1, 0]


def test_parts_double_at_each_cut() -> None:
    assert [parts_of(n) for n in (0, 511, 512, 2047, 2048, 10**6)] == [1, 1, 2, 2, 4, 32]
    assert parts_of(CUTS[-1]) == 2 ** len(CUTS)
