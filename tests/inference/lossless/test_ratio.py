"""Rule ratio in the decoder: draws of real heads, chains and trees, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference import ratio
from headsmith.inference.distribution import check_distribution
from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.drawn import DrawnEagleDrafter, draw_with, log_distribution
from headsmith.inference.equality import check_equality
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.medusa import MedusaDrafter
from headsmith.inference.noise import Place
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import Request, Response
from headsmith.inference.rules import make_rule
from headsmith.inference.sampling import Shaping
from headsmith.inference.tree import Branches, Chain, DynamicTree, RankTree, Tree, parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

Decode = Callable[..., list[Response]]
N = 14
SHAPING = Shaping(repetition=1.2, presence=0.2, top_k=30, top_p=0.9)
RULE = Ratio(0.7, seed=4, shaping=SHAPING)


@pytest.fixture(scope="module")
def medusa(small_target: Target) -> MedusaHead:
    """Three heads that draft every second id."""
    vocabulary = torch.arange(0, small_target.vocab_size, 2)
    return MedusaHead.for_target(small_target, vocabulary, num_heads=3, lm_head="truncated")


def texts(responses: list[Response]) -> list[list[int]]:
    return [one.output_ids for one in responses]


WIDE = RankTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


SHAPES = [Chain(3), Branches((3, 2, 1))]


@pytest.mark.parametrize(
    ("kind", "shape"),
    # Rank paths are for Medusa heads.
    [*(("eagle", shape) for shape in SHAPES), *(("medusa", shape) for shape in [*SHAPES, WIDE])],
    ids=str,
)
def test_text_and_passes_are_the_same_in_any_batch(
    kind: str,
    shape: Any,
    small_target: Target,
    head: Eagle3Head,
    medusa: MedusaHead,
    requests: list[Request],
    decode: Decode,
) -> None:
    drafter = make_drafter(head if kind == "eagle" else medusa, small_target, shape, RULE)
    one, three = (
        decode(drafter, requests, batch=batch, max_new_tokens=N, rule=RULE) for batch in (1, 3)
    )
    assert texts(one) == texts(three) and [r.passes for r in one] == [r.passes for r in three]
    assert any(p.accepted for r in one for p in r.passes)
    other = replace(RULE, seed=5)
    drafter = make_drafter(head if kind == "eagle" else medusa, small_target, shape, other)
    assert texts(decode(drafter, requests, max_new_tokens=N, rule=other)) != texts(one)


def test_without_a_draft_it_is_plain_sampling(requests: list[Request], decode: Decode) -> None:
    plain = decode(None, requests, max_new_tokens=N, rule=RULE.plain)
    assert texts(decode(None, requests, max_new_tokens=N, rule=RULE)) == texts(plain)


def update_of(target: Target, prompt: list[int], taps: tuple[int, ...], slot: int) -> Update:
    features = target.features(torch.tensor(prompt), [len(prompt)], taps)
    place = Place(f"text {slot}", len(prompt) + 1)
    return Update(slot, [*prompt[1:], 7], features.taps.clone(), features.last[-1], place)


def test_q_behind_every_node_is_that_of_a_chain_of_its_ancestors(
    small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    """All nodes of a level are drafted at once; each sees its own ancestors only."""
    drafter = DrawnEagleDrafter(head, small_target, Branches((3, 2, 2, 1)), RULE)
    updates = [update_of(small_target, r.prompt_ids, head.taps, i) for i, r in enumerate(requests)]
    drafter.reset(len(updates), 60)
    trees = drafter.propose(updates)
    assert [len(tree.children[0]) for tree in trees] == [3] * len(trees)
    for update, tree in zip(updates, trees, strict=True):
        assert tree.drawn is not None
        for node, path in enumerate(tree.paths):
            if tree.drawn.rows[node] < 0:
                assert not tree.children[node]
                continue
            expected = q_by_hand(drafter, update, path)
            torch.testing.assert_close(tree.drawn.q[tree.drawn.rows[node]], expected)
            children = [tree.tokens[c] for c in tree.children[node]]
            assert len(set(children)) == len(children)
            assert set(children) <= set(head.draft_ids.tolist())


def q_by_hand(drafter: DrawnEagleDrafter, update: Update, path: tuple[int, ...]) -> torch.Tensor:
    """q behind the drafts `path`, one forced draft after the other."""
    forced = list(path)
    found = []

    class Forced(EagleDrafter):
        def run(self) -> None:
            from headsmith.models.spans import Span

            self.reset(1, 60)
            g = self._extend([replace(update, slot=0)])
            found.append(g)
            for step, token in enumerate(forced):
                spans = [Span(1, self._lengths[0] + step, 0)]
                g = self._layer(torch.tensor([token]), self.head.feedback(g), spans)
                found.append(g)

    with torch.inference_mode():
        Forced(drafter.head, drafter.target, Chain(1)).run()
        return log_distribution(drafter.rule, drafter.head.logits(found[-1]))[0].double().exp()


def test_almost_without_temperature_the_first_draws_are_the_greedy_ones(
    small_target: Target, head: Eagle3Head, medusa: MedusaHead, requests: list[Request]
) -> None:
    cold = Ratio(1e-4)
    for kind in (head, medusa):
        updates = [
            update_of(small_target, r.prompt_ids, kind.taps, i) for i, r in enumerate(requests)
        ]
        chains, drawn, trees = (
            (drafter.reset(len(updates), 60), drafter.propose(updates))[1]
            for drafter in (
                make_drafter(kind, small_target, Chain(3)),
                make_drafter(kind, small_target, Chain(3), cold),
                make_drafter(kind, small_target, Branches((2, 2, 1)), cold),
            )
        )
        assert [tree.tokens for tree in drawn] == [tree.tokens for tree in chains]
        assert [tree.drawn is None for tree in (*chains, *drawn)] == [True] * 5 + [False] * 5
        for tree, chain in zip(trees, chains, strict=True):
            assert tuple(chain.tokens[1:]) in tree.paths


def test_what_has_no_probability_is_no_node(
    small_target: Target, head: Eagle3Head, medusa: MedusaHead, requests: list[Request]
) -> None:
    """Three children of a distribution that was cut to two tokens are two."""
    rule = replace(RULE, shaping=Shaping(top_k=2))
    for kind in (head, medusa):
        updates = [update_of(small_target, requests[1].prompt_ids, kind.taps, 0)]
        drafter = make_drafter(kind, small_target, Branches((3, 3)), rule)
        drafter.reset(1, 60)
        (tree,) = drafter.propose(updates)
        assert len(tree) == 1 + 2 + 4 and tree.drawn is not None
        assert len(tree.drawn.rows) == len(tree)
        # A tree that the context cuts keeps what its nodes were drawn from.
        short = tree.cut(1)
        assert short.drawn is not None and short.drawn.rows == tree.drawn.rows[:3]


@pytest.mark.parametrize("shape", ["chain:3", "branches:3,2"])
def test_the_text_could_be_the_targets_own_draws(
    shape: str,
    small_target: Target,
    head: Eagle3Head,
    requests: list[Request],
    decode: Decode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is kept too readily could not, nor what was drawn under other settings."""
    rule = Ratio(1.0, seed=2, shaping=Shaping(top_k=60))
    drafter = make_drafter(head, small_target, parse_shape(shape), rule)
    got = decode(drafter, requests, batch=5, max_new_tokens=60, rule=rule)
    drawn = check_distribution(small_target, got, rule)
    assert drawn.tokens == 300 and drawn.impossible == 0
    assert drawn.z is not None and abs(drawn.z) < 3
    narrow = check_distribution(small_target, got, replace(rule, shaping=Shaping(top_k=4)))
    assert narrow.impossible > 30
    monkeypatch.setattr(ratio, "acceptance", lambda p, q: 1)
    wrong = decode(drafter, requests, batch=5, max_new_tokens=60, rule=rule)
    found = check_distribution(small_target, wrong, rule)
    assert found.impossible > 0 or (found.z is not None and abs(found.z) > 5)


def test_nothing_drawn_says_nothing(small_target: Target) -> None:
    assert check_distribution(small_target, [], RULE).z is None


def test_its_text_is_not_held_to_that_of_plain_sampling(small_target: Target) -> None:
    assert RULE.lossless and not RULE.coupled
    with pytest.raises(AssertionError, match="not the target's own"):
        check_equality(small_target, [], rule=RULE)


def test_drafts_that_are_no_draws_are_refused(
    small_target: Target, head: Eagle3Head, medusa: MedusaHead
) -> None:
    with pytest.raises(HeadsmithError, match="rule ratio needs nodes that were drawn; give chain"):
        draw_with(head, small_target, DynamicTree(8, 2, 3), RULE)
    for kind, maker in ((head, EagleDrafter), (medusa, MedusaDrafter)):
        with pytest.raises(HeadsmithError, match="only rule ratio at a temperature above 0"):
            maker(kind, small_target, Branches((2, 1)))  # type: ignore[operator]
    with pytest.raises(HeadsmithError, match="goes 4 drafts deep and there are 3"):
        draw_with(medusa, small_target, Branches((2, 1, 1, 1)), RULE)


def test_a_tree_of_branches() -> None:
    shape = parse_shape("branches:3,2,1")
    assert shape == Branches((3, 2, 1)) and str(shape) == "branches:3,2,1"
    assert (shape.levels, shape.nodes, shape.depth, shape.topk) == ([3, 6, 6], 15, 3, 6)
    with pytest.raises(HeadsmithError, match="width 2 is 0"):
        parse_shape("branches:3,0")


def test_at_temperature_zero_it_is_greedy() -> None:
    assert make_rule("ratio", 0.0) is make_rule("greedy")


def test_the_paths_of_a_tree() -> None:
    tree = Tree([9, 4, 5, 6], [-1, 0, 0, 1])
    assert tree.paths == [(), (4,), (5,), (4, 6)]
