"""Rules: what is sampled is sampled alike with and without drafts; typical acceptance is its
formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headsmith.inference.accept import (
    GREEDY,
    Rule,
    Sample,
    Typical,
)
from headsmith.inference.drafters import EagleDrafter
from headsmith.inference.equality import check_equality, likelihood
from headsmith.inference.noise import Place, gumbel
from headsmith.inference.records import Request, Response
from headsmith.inference.rules import make_rule
from headsmith.inference.tree import Chain, DynamicTree, Tree, parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.spans import Span
from headsmith.models.target import Target

Decode = Callable[..., list[Response]]
N = 14


def outputs(responses: list[Response]) -> list[list[int]]:
    return [one.output_ids for one in responses]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampled_text_is_the_same_with_any_draft(
    temperature: float,
    batch: int,
    small_target: Target,
    head: Eagle3Head,
    requests: list[Request],
    knows: Callable[[dict[str, list[int]]], SimpleNamespace],
    decode: Decode,
    same_text: Decode,
) -> None:
    rule = Sample(temperature, seed=5)
    for shape in ("chain:4", "tree:24,4,5"):
        drafter = EagleDrafter(head, small_target, parse_shape(shape))
        same_text(drafter, batch, max_new_tokens=N, rule=rule)
    drawn = decode(None, requests, max_new_tokens=N, rule=rule)
    knowing = knows({one.request.id: one.output_ids for one in drawn})
    for one in same_text(knowing.Perfect(Chain(3)), batch, max_new_tokens=N, rule=rule):
        assert all(p.accepted == 3 for p in one.passes[:-1])
    trees = knowing.RandomTrees(DynamicTree(14, 4, 6), 2)
    got = same_text(trees, batch, max_new_tokens=N, rule=rule)
    assert max(p.accepted for one in got for p in one.passes) >= 2


@dataclass(frozen=True, slots=True)
class _Fresh(Sample):
    """The bug: a draw that is made again with other noise."""

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        again = torch.randint(2**31, (1,)).item()
        return Sample(self.temperature, int(again)).scores(logits, places)


def test_noise_that_is_not_keyed_is_found(
    small_target: Target, head: Eagle3Head, same_text: Decode
) -> None:
    torch.manual_seed(0)
    drafter = EagleDrafter(head, small_target, Chain(4))
    with pytest.raises(AssertionError):
        same_text(drafter, 3, max_new_tokens=N, rule=_Fresh(1.0))


def test_seeds_requests_and_positions_have_their_own_noise() -> None:
    here = Place("a", 3)
    assert torch.equal(gumbel(1, here, 50), gumbel(1, here, 50))
    for seed, place in ((2, here), (1, Place("b", 3)), (1, Place("a", 4))):
        assert not torch.equal(gumbel(1, here, 50), gumbel(seed, place, 50))


def test_draws_follow_the_targets_distribution() -> None:
    """Chi-square over 20,000 draws, four cells; it has the power to tell temperature 1 from 0.9."""
    logits = torch.tensor([1.0, 0.0, -0.5, -2.0])
    places = [Place("text", i) for i in range(20_000)]
    rows = logits.expand(len(places), -1)
    counts = Sample(0.9).scores(rows, places).argmax(-1).bincount(minlength=4)

    def chi_square(temperature: float) -> float:
        expected = (logits / temperature).softmax(-1) * len(places)
        return float(((counts - expected) ** 2 / expected).sum())

    assert chi_square(0.9) < 16.3 < chi_square(1.0)  # 0.1 % of three degrees of freedom


#        0
#     1     2
#     3
TREE = Tree([9, 0, 2, 3], [-1, 0, 0, 1])
P = torch.tensor([0.5, 0.2, 0.2, 0.1])


def kept(rule: Rule, rows: list[Tensor]) -> tuple[list[int], int]:
    logits = torch.stack([row.log() for row in rows])
    accepted = rule.accept(TREE, logits, logits.argmax(-1).tolist(), [])
    return accepted.path, accepted.bonus


def test_the_bar_of_typical_acceptance() -> None:
    """spec/medusa.md 4.2: for (.5, .2, .2, .1) the entropy is 1.2206 nats and the bar .0885."""
    alpha_branch = Typical(1.0, threshold=0.09, alpha=0.3)
    bar = 0.3 * math.exp(float((P * (P + 1e-5).log()).sum()))
    assert bar == pytest.approx(0.0885, abs=1e-4)
    # Token 3 of probability .1 passes behind node 1, so that path is the longest one.
    assert kept(alpha_branch, [P, P, P, P]) == ([0, 1, 3], 0)
    assert kept(Typical(1.0, threshold=0.11, alpha=1.0), [P, P, P, P]) == ([0, 1], 0)
    # sqrt(threshold) is what alpha is unless it is given.
    assert Typical(1.0, 0.09).accept(TREE, P.log().repeat(4, 1), [0] * 4) == alpha_branch.accept(
        TREE, P.log().repeat(4, 1), [0] * 4
    )


def test_of_paths_as_long_the_likelier_is_kept() -> None:
    sure = torch.tensor([0.3, 0.05, 0.6, 0.05])
    # Behind node 1 token 3 is too unlikely; nodes 1 and 2 are both acceptable, 2 is likelier.
    assert kept(Typical(1.0), [sure, sure, sure, sure]) == ([0, 2], 2)


def test_temperature_moves_the_bar() -> None:
    rows = [P, P, P, P]
    assert kept(Typical(0.2), rows)[0] == [0, 1]
    assert kept(Typical(5.0), rows)[0] == [0, 1, 3]


def test_typical_at_temperature_zero_is_greedy(
    small_target: Target, requests: list[Request], head: Eagle3Head, decode: Decode
) -> None:
    assert make_rule("typical", 0.0) is GREEDY and make_rule("sample", 0.0) is GREEDY
    drafter = EagleDrafter(head, small_target, parse_shape("tree:24,4,5"))
    plain = outputs(decode(None, requests, max_new_tokens=N))
    almost = decode(drafter, requests, max_new_tokens=N, rule=Typical(1e-5))
    assert outputs(almost) == plain


def test_typical_keeps_more_and_is_the_same_in_any_batch(
    small_target: Target, requests: list[Request], head: Eagle3Head, decode: Decode
) -> None:
    drafter = EagleDrafter(head, small_target, parse_shape("tree:24,4,5"))
    runs = {
        name: decode(drafter, requests, max_new_tokens=30, batch=batch, rule=rule)
        for name, rule, batch in (
            ("greedy", GREEDY, 1),
            ("lax", Typical(1.0, threshold=0.001), 1),
            ("lax in threes", Typical(1.0, threshold=0.001), 3),
        )
    }
    passes = {name: sum(len(one.passes) for one in got) for name, got in runs.items()}
    assert passes["lax"] < passes["greedy"]
    assert outputs(runs["lax"]) == outputs(runs["lax in threes"])
    plain, lax = (likelihood(small_target, runs[name]) for name in ("greedy", "lax"))
    assert plain.first_choices == plain.tokens == lax.tokens == 150
    assert lax.first_choices < lax.tokens and lax.log_likelihood < plain.log_likelihood


def test_equality_knows_the_rule(
    small_target: Target, requests: list[Request], decode: Decode
) -> None:
    rule = Sample(0.8, seed=3)
    responses = decode(None, requests, max_new_tokens=N, rule=rule)
    got = check_equality(small_target, responses, rule=rule)
    assert got.checked == got.exact == 5 * N
    other = check_equality(small_target, responses, rule=Sample(0.8, seed=4))
    assert other.fails > N
    responses[2].output_ids[7] = (responses[2].output_ids[7] + 1) % small_target.vocab_size
    wrong = check_equality(small_target, responses, tie_margin=0.0, rule=rule)
    assert wrong.first_divergence is not None
    assert (wrong.first_divergence["id"], wrong.first_divergence["index"]) == ("r2", 7)
    with pytest.raises(AssertionError, match="not the target's own"):
        check_equality(small_target, responses, rule=Typical(1.0))


def test_likelihood_is_that_of_the_whole_text(
    small_target: Target, requests: list[Request], decode: Decode
) -> None:
    responses = decode(None, requests[:1], max_new_tokens=N, rule=Sample(1.0))
    ids = torch.tensor([*requests[0].prompt_ids, *responses[0].output_ids])
    logits = small_target.logits(small_target.run(ids, [Span(len(ids))]).last)
    at = range(len(requests[0].prompt_ids), len(ids))
    expected = sum(float(logits[i - 1].log_softmax(-1)[ids[i]]) for i in at)
    got = likelihood(small_target, responses)
    assert got.tokens == N and got.log_likelihood == pytest.approx(expected, rel=1e-5)
    assert likelihood(small_target, []).tokens == 0
