"""Trees: shapes from text, ancestry, cutting, and choosing the likeliest nodes."""

from __future__ import annotations

import random

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.tree import Chain, DynamicTree, Tree, choose_nodes, parse_shape


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("chain:1", Chain(1)),
        ("chain:4", Chain(4)),
        ("tree:24,4,5", DynamicTree(24, 4, 5)),
        ("tree:24, 4, 5", DynamicTree(24, 4, 5)),
    ],
)
def test_parse_shape(text: str, shape: object) -> None:
    assert parse_shape(text) == shape
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    ["", "chain", "chain:", "chain:a", "chain:1,2", "chain:1.5", "tree:4", "tree:1,2", "tree:1,2,x"]
    + ["star:3", "4", "chain 4", "tree:1,2,3,4", "CHAIN:4"],
)
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(HeadsmithError, match="for example chain:4"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chain:0", "depth is 0"),
        ("chain:-3", "depth is -3"),
        ("tree:-24,4,5", "nodes is -24"),
        ("tree:24,0,5", "topk is 0"),
        ("tree:24,4,-1", "depth is -1"),
    ],
)
def test_sizes_below_one_are_refused(text: str, words: str) -> None:
    with pytest.raises(HeadsmithError, match=f"{words}; it must be at least 1"):
        parse_shape(text)


def random_tree(nodes: int, seed: int) -> Tree:
    chooser = random.Random(seed)
    parents = [-1, *(chooser.randrange(i) for i in range(1, nodes))]
    return Tree([chooser.randrange(50) for _ in range(nodes)], parents)


@pytest.mark.parametrize("seed", range(8))
def test_ancestry_follows_the_parents(seed: int) -> None:
    tree = random_tree(12, seed)
    for node in range(len(tree)):
        path, at = set(), node
        while at >= 0:
            path.add(at)
            at = tree.parents[at]
        assert set(tree.ancestors[node].nonzero().flatten().tolist()) == path
        assert tree.depths[node] == len(path) - 1
    # Each node's ancestors are itself and as many as it is deep.
    assert tree.ancestors.sum(1).tolist() == [d + 1 for d in tree.depths]
    assert tree.depth == max(tree.depths)
    for node, children in enumerate(tree.children):
        assert children == [c for c in range(len(tree)) if tree.parents[c] == node]


def test_a_chain_is_a_tree() -> None:
    tree = Tree.chain([7, 8, 9])
    assert (tree.tokens, tree.parents, tree.depths) == ([7, 8, 9], [-1, 0, 1], [0, 1, 2])
    assert tree.is_chain and tree.depth == 2
    assert torch.equal(tree.ancestors, torch.ones(3, 3, dtype=torch.bool).tril())
    assert Tree([7], [-1]).is_chain and Tree([7], [-1]).depth == 0
    assert not Tree([7, 8, 9], [-1, 0, 0]).is_chain


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 99])
def test_cut_keeps_what_is_not_too_deep(seed: int, depth: int) -> None:
    tree = random_tree(12, seed)
    kept = [i for i, d in enumerate(tree.depths) if d <= depth]
    cut = tree.cut(depth)
    assert cut.tokens == [tree.tokens[i] for i in kept]
    assert cut.depths == [tree.depths[i] for i in kept]
    assert torch.equal(cut.ancestors, tree.ancestors[kept][:, kept])
    assert tree.cut(tree.depth) is tree


def choose(
    scores: list[float], parents: list[int], count: int, tokens: list[int] | None = None
) -> Tree:
    numbers = list(range(100, 100 + len(scores))) if tokens is None else tokens
    return choose_nodes(
        torch.tensor(numbers), torch.tensor(scores), torch.tensor(parents), 5, count
    )


def test_the_likeliest_nodes_are_chosen() -> None:
    scores, parents = [-1.0, -2.0, -1.5, -4.0, -2.5, -9.0], [-1, -1, 0, 0, 1, 1]
    tree = choose(scores, parents, 4)
    assert tree.tokens == [5, 100, 101, 102, 104]
    assert tree.parents == [-1, 0, 0, 1, 2]


def test_of_equal_scores_the_lower_number_is_taken() -> None:
    """A child of probability 1 scores as much as its parent and must not be taken without it."""
    scores, parents = [-1.0, -1.0, -1.0, -1.0, -1.0], [-1, -1, 0, 2, 3]
    for count in range(1, 6):
        tree = choose(scores, parents, count)
        assert tree.tokens == [5, *range(100, 100 + count)]
        assert all(parent < node for node, parent in enumerate(tree.parents))
    assert choose(scores, parents, 5).parents == [-1, 0, 0, 1, 3, 4]


def test_fewer_candidates_than_nodes() -> None:
    assert choose([-1.0, -2.0], [-1, 0], 60).parents == [-1, 0, 1]


def test_scores_that_are_no_numbers_come_last() -> None:
    """A head that overflows drafts badly, but what it drafts is still a tree."""
    nan, inf = float("nan"), float("inf")
    tree = choose([-1.0, -2.0, nan, -3.0, nan, -inf], [-1, -1, 0, 1, 2, 3], 3)
    assert (tree.tokens, tree.parents) == ([5, 100, 101, 103], [-1, 0, 0, 2])
    for count in range(1, 7):
        tree = choose([nan, -2.0, nan, -3.0, nan, -inf], [-1, -1, 0, 1, 2, 3], count)
        assert all(0 <= p < i for i, p in enumerate(tree.parents) if i)


@pytest.mark.parametrize("seed", range(20))
def test_chosen_nodes_are_a_tree_of_the_best(seed: int) -> None:
    """Against choosing by hand, with many equal scores."""
    chooser = random.Random(seed)
    parents = [-1 if i < 3 else chooser.randrange(-1, i) for i in range(40)]
    scores: list[float] = []
    for parent in parents:
        scores.append((0.0 if parent < 0 else scores[parent]) - chooser.choice([0.0, 0.5, 1.0]))
    count = chooser.randint(1, 40)
    best = sorted(sorted(range(40), key=lambda i: (-scores[i], i))[:count])
    tree = choose(scores, parents, count)
    place = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(best)}
    assert tree.tokens == [5, *(100 + i for i in best)]
    assert tree.parents == [-1, *(place[parents[i]] for i in best)]
