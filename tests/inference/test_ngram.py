"""N-gram lookup against a scan of the whole text."""

from __future__ import annotations

import random

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.drafter_choice import PICKS, Ngram
from headsmith.inference.drafters import Update
from headsmith.inference.ngram import NgramDrafter
from headsmith.inference.records import Request
from headsmith.inference.tree import Calibrated, Chain, Draft, DynamicTree, RankTree, Tree

NONE = torch.empty(0)


def drafted(choice: Ngram, shape: Draft, text: list[int], prompt: int = 2) -> Tree:
    """The tree behind `text`, taken in as a prompt, a first token and a pass of the rest."""
    drafter = NgramDrafter(choice, shape)
    request = Request("a", "task", text[:prompt])
    updates = [Update(0, text[1 : prompt + 1], NONE, request=request)]
    updates += [Update(0, text[prompt + 1 :], NONE)] if text[prompt + 1 :] else []
    return [drafter.propose([update])[0] for update in updates][-1]


def scanned(choice: Ngram, text: list[int], depth: int) -> list[int]:
    """The run by definition: look at every earlier place, measure how much of the end is alike."""

    def alike(place: int) -> int:
        lengths = range(choice.minimum, choice.maximum + 1)
        return max(
            (n for n in lengths if n <= place and text[-n:] == text[place - n : place]), default=0
        )

    places = [p for p in range(1, len(text)) if alike(p)]
    if not places:
        return []
    key = {
        "longest": lambda p: (alike(p), p),
        "first": lambda p: (alike(p), -p),
        "recent": lambda p: p,
    }[choice.pick]
    period = text[max(places, key=key) :]
    return (period * depth)[:depth] if len(period) < depth else period[:depth]


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("bounds", [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_the_run_behind_the_best_match(pick: str, bounds: tuple[int, int]) -> None:
    chooser, choice, found = random.Random(sum(bounds)), Ngram(*bounds, pick), 0
    for _ in range(60):
        text = [chooser.randrange(3) for _ in range(chooser.randint(4, 30))]
        tree = drafted(choice, Chain(5), text)
        assert tree.is_chain and tree.tokens == [text[-1], *scanned(choice, text, 5)]
        found += len(tree) > 1
    assert found > 10


def test_the_picks_differ() -> None:
    #       (1 2) 3     (2) 4  ends with (1 2)
    text = [1, 2, 3, 9, 1, 2, 5, 8, 2, 4, 1, 2]
    assert drafted(Ngram(1, 2, "longest"), Chain(1), text).tokens == [2, 5]
    assert drafted(Ngram(1, 2, "first"), Chain(1), text).tokens == [2, 3]
    assert drafted(Ngram(1, 2, "recent"), Chain(1), text).tokens == [2, 4]


def test_a_run_that_reaches_the_end_goes_round() -> None:
    """spec/medusa.md 5.2's example; vLLM stops at the end, after 4 2 3."""
    assert drafted(Ngram(2, 3), Chain(5), [1, 2, 3, 4, 2, 3]).tokens == [3, 4, 2, 3, 4, 2]
    assert drafted(Ngram(1, 1), Chain(4), [5, 7, 7]).tokens == [7, 7, 7, 7, 7]


def test_no_match_is_no_draft() -> None:
    for shape in (Chain(4), DynamicTree(6, 2, 3)):
        assert len(drafted(Ngram(1, 3), shape, [1, 2, 3, 4, 5])) == 1
        assert len(drafted(Ngram(3, 4), shape, [1, 2, 3, 9, 2, 3])) == 1


def test_a_tree_holds_the_runs_of_several_matches() -> None:
    text = [7, 1, 2, 7, 1, 3, 7, 4, 4, 7, 1, 2, 7]
    tree = drafted(Ngram(1, 1), DynamicTree(9, 3, 2), text)
    # From the latest match to the earliest; 1 2 stands there twice, and 1 is shared.
    assert (tree.tokens, tree.parents) == ([7, 1, 2, 4, 4, 3], [-1, 0, 1, 0, 3, 1])
    assert len(drafted(Ngram(1, 1), DynamicTree(3, 3, 2), text)) == 4
    assert drafted(Ngram(1, 1), DynamicTree(9, 1, 2), text).tokens == [7, 1, 2]


@pytest.mark.parametrize("shape", [RankTree.chain(2), Calibrated(4)])
def test_shapes_of_ranks_are_refused(shape: Draft) -> None:
    with pytest.raises(
        HeadsmithError, match="cannot be filled by drafter ngram:2,4,longest; give ch"
    ):
        NgramDrafter(Ngram(), shape)
