"""The greedy rule: only the target's argmax is followed."""

from __future__ import annotations

import pytest

from headsmith.inference.accept import follow
from headsmith.inference.tree import Tree

#        0:5
#     1:7   2:8
#   3:1 4:2   5:1
#             6:9
TREE = Tree([5, 7, 8, 1, 2, 1, 9], [-1, 0, 0, 1, 1, 2, 5])


@pytest.mark.parametrize(
    ("predictions", "path", "bonus"),
    [
        ([3, 1, 1, 0, 0, 9, 4], [0], 3),
        ([7, 3, 1, 0, 0, 9, 4], [0, 1], 3),
        ([7, 2, 1, 0, 6, 9, 4], [0, 1, 4], 6),
        ([8, 1, 2, 0, 0, 9, 4], [0, 2], 2),
        ([8, 1, 1, 0, 0, 9, 4], [0, 2, 5, 6], 4),
        ([8, 1, 1, 0, 0, 7, 4], [0, 2, 5], 7),
    ],
)
def test_the_walk(predictions: list[int], path: list[int], bonus: int) -> None:
    accepted = follow(TREE, predictions)
    assert (accepted.path, accepted.bonus) == (path, bonus)


def test_a_root_alone_gives_the_targets_token() -> None:
    accepted = follow(Tree([5], [-1]), [12])
    assert (accepted.path, accepted.bonus) == ([0], 12)


def test_a_whole_chain() -> None:
    accepted = follow(Tree.chain([1, 2, 3]), [2, 3, 4])
    assert (accepted.path, accepted.bonus) == ([0, 1, 2], 4)


def test_a_token_right_at_the_wrong_place_is_not_accepted() -> None:
    accepted = follow(Tree.chain([1, 2, 3]), [9, 3, 4])
    assert (accepted.path, accepted.bonus) == ([0], 9)


def test_of_siblings_with_one_token_the_first_is_taken() -> None:
    accepted = follow(Tree([1, 2, 2, 3], [-1, 0, 0, 2]), [2, 8, 3, 4])
    assert (accepted.path, accepted.bonus) == ([0, 1], 8)
