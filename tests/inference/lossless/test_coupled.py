"""The coupled test: with noise keyed by place, the text with any draft is that of plain sampling,
token for token, in float32, every setting on; a setting that acts a little otherwise on drafts is
found (spec/medusa.md 4.7).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.inference.accept import Greedy, Rule, Sample
from headsmith.inference.drafters import Drafter
from headsmith.inference.engine import Decoder
from headsmith.inference.equality import check_equality
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.noise import Place
from headsmith.inference.records import Request, Response
from headsmith.inference.sampling import Shaping
from headsmith.inference.tree import Chain, DynamicTree, RankTree, parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

N = 16
PENALTIES = Shaping(
    bias=((3, 1.0), (50, -2.0)), repetition=1.2, presence=0.3, frequency=0.2, top_p=0.9
)
ALL = replace(PENALTIES, top_k=40, min_p=0.01)
DRAFTERS = ["eagle chain", "eagle tree", "medusa chain", "medusa tree", "perfect", "any tree"]


@pytest.fixture(scope="module")
def target(small_target: Target) -> Target:
    """In float32, where one row and several may round differently."""
    model = copy.deepcopy(small_target.model).float()
    return Target(model, small_target.tokenizer, "small, float32")


@pytest.fixture(scope="module")
def drafter(
    target: Target, head: Eagle3Head, knows: Callable[..., SimpleNamespace]
) -> Callable[..., Drafter]:
    """drafter(kind, what plain decoding says): a drafter of that kind."""
    medusa = MedusaHead.for_target(target, None, num_heads=3, lm_head="shared")
    wide = RankTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))

    def make(kind: str, plain: list[Response]) -> Drafter:
        knowing = knows({one.request.id: one.output_ids for one in plain})
        makers: dict[str, Callable[[], Drafter]] = {
            "eagle chain": lambda: make_drafter(head, target, Chain(4)),
            "eagle tree": lambda: make_drafter(head, target, parse_shape("tree:24,4,5")),
            "medusa chain": lambda: make_drafter(medusa, target, Chain(3)),
            "medusa tree": lambda: make_drafter(medusa, target, wide),
            "perfect": lambda: knowing.Perfect(Chain(3)),
            "any tree": lambda: knowing.RandomTrees(DynamicTree(14, 4, 6), 2),
        }
        return makers[kind]()

    return make


def decode(
    target: Target, drafter: Drafter | None, requests: list[Request], rule: Rule, batch: int = 5
) -> list[Response]:
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=N, rule=rule)
    return decoder.generate(requests)[0]


def texts(responses: list[Response]) -> list[list[int]]:
    return [one.output_ids for one in responses]


@pytest.fixture(scope="module")
def plain(target: Target, requests: list[Request]) -> Callable[[Rule], list[Response]]:
    """plain(rule): decoding without a drafter, once for each rule."""
    return cache(lambda rule: decode(target, None, requests, rule))


def rule_at(temperature: float) -> Rule:
    return Sample(temperature, 7, ALL) if temperature else Greedy(PENALTIES)


CASES = [(1, 0.7), *((3, temperature) for temperature in (0.0, 0.3, 0.7, 1.0))]


@pytest.mark.parametrize(("batch", "temperature"), CASES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_text_is_that_of_plain_decoding(
    kind: str,
    batch: int,
    temperature: float,
    target: Target,
    requests: list[Request],
    drafter: Callable[..., Drafter],
    plain: Callable[[Rule], list[Response]],
) -> None:
    rule = rule_at(temperature)
    got = decode(target, drafter(kind, plain(rule)), requests, rule, batch)
    assert texts(got) == texts(plain(rule))
    equality = check_equality(target, got, rule=rule)
    assert equality.exact == equality.checked == len(requests) * N
    if kind in ("perfect", "any tree"):
        assert max(p.accepted for one in got for p in one.passes) >= 3


@pytest.mark.parametrize("rule", [Sample(0.7, 7, PENALTIES), Greedy(PENALTIES)], ids=str)
def test_the_settings_change_the_text(rule: Rule, target: Target, requests: list[Request]) -> None:
    """Or the test above would show nothing; and the check knows with which the text was made."""
    plain = decode(target, None, requests, rule)
    for name in ("bias", "repetition", "presence", "frequency"):
        other = replace(rule, shaping=replace(PENALTIES, **{name: getattr(Shaping(), name)}))  # type: ignore[type-var]
        assert texts(decode(target, None, requests, other)) != texts(plain)
        checked = check_equality(target, plain, rule=other)
        assert checked.exact < checked.checked
    if isinstance(rule, Sample):
        wide = replace(rule, shaping=replace(PENALTIES, top_p=1.0))
        assert texts(decode(target, None, requests, wide)) != texts(plain)


@dataclass(frozen=True, slots=True)
class _ForgetsAncestors(Sample):
    """The bug: penalties count what was committed, and no drafts before a node."""

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        forgotten = [replace(place, path=()) for place in places]
        return Sample.scores(self, logits, forgotten, slack)


@dataclass(frozen=True, slots=True)
class _OnlyAtTheRoot(Sample):
    """The bug: settings act on the first row of a pass, drafts are judged without them."""

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        scores = Sample(self.temperature, self.seed).scores(logits, places, slack)
        rows = [i for i, place in enumerate(places) if not place.path]
        own = Sample.scores(self, logits[rows], [places[i] for i in rows], slack)
        return scores.index_copy(0, torch.tensor(rows), own)


@dataclass(frozen=True, slots=True)
class _Fresh(Sample):
    """The bug: noise that is not keyed."""

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        again = int(torch.randint(2**31, (1,)).item())
        return Sample(self.temperature, again, self.shaping).scores(logits, places, slack)


@pytest.mark.parametrize("wrong", [_ForgetsAncestors, _OnlyAtTheRoot, _Fresh])
def test_a_wrong_rule_is_found(
    wrong: type[Sample], target: Target, requests: list[Request], drafter: Callable[..., Any]
) -> None:
    """Plain decoding is right with the first two: nothing is drafted in it."""
    torch.manual_seed(0)
    rule = wrong(0.7, 7, PENALTIES)
    plain = decode(target, None, requests, Sample(0.7, 7, PENALTIES))
    knowing = drafter("perfect", plain)
    knowing.strict = False
    got = decode(target, knowing, requests, rule)
    assert texts(got) != texts(plain)
    if wrong is not _Fresh:
        assert texts(decode(target, None, requests, rule)) == texts(plain)
    checked = check_equality(target, got, rule=Sample(0.7, 7, PENALTIES))
    assert checked.exact < checked.checked
