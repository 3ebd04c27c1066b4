"""Trees built on the device against those of the beam search and of `choose_nodes`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from headsmith.inference.beam import draft_trees
from headsmith.inference.kernels import tree_build
from headsmith.inference.kernels.tree_build import Candidates, Trees, build, grow
from headsmith.inference.ranking import ByLogits
from headsmith.inference.tree import DynamicTree, Tree, choose_nodes

VOCAB = 23
SHAPES = [(1, 1, 1), (5, 1, 5), (7, 3, 3), (63, 4, 6), (40, 10, 3), (9, 3, 2), (30, 4, 2)]


def table(seed: int) -> Tensor:
    """Logits behind each token."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, VOCAB, generator=g) * 2


def with_kernels(logits: Tensor, shape: DynamicTree, roots: Tensor, lengths: Tensor) -> Trees:
    k = min(shape.topk, VOCAB)
    found = Candidates.empty(len(roots), k, shape.depth, roots.device)
    frontier, tokens = None, roots[:, None]
    for level in range(shape.depth):
        logp, ids = logits[tokens].log_softmax(-1).topk(k)
        frontier = grow(ids, logp, frontier, found, level)
        tokens = frontier.tokens
    return build(found, roots, lengths, shape.nodes)


def assert_are(trees: Trees, expected: list[Tree], lengths: Tensor) -> None:
    for i, tree in enumerate(expected):
        assert trees.tokens[i].tolist() == tree.tokens
        assert trees.parents[i].tolist() == tree.parents
        assert trees.positions[i].tolist() == [int(lengths[i]) + d for d in tree.depths]
        bits = trees.words[i][:, None] >> torch.arange(len(tree)) & 1
        assert torch.equal(bits.bool(), tree.ancestors)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_trees_are_those_of_the_beam_search(
    shape: tuple[int, int, int], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots, lengths = torch.tensor([3, 0, 22]), torch.tensor([7, 1, 4000])
    logits, form = table(sum(shape)), DynamicTree(*shape)

    def expand(tokens: Tensor, origins: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
        return logits[tokens]

    # The states are the logits themselves; one of the two ways to a tree is the reference.
    monkeypatch.setenv("HEADSMITH_KERNELS", "off")
    ranking = ByLogits(lambda states: states, VOCAB)
    expected = draft_trees(logits[roots], expand, form, roots.tolist(), ranking)
    monkeypatch.setenv("HEADSMITH_KERNELS", kernels)
    assert_are(with_kernels(logits, form, roots, lengths), expected, lengths)


def candidates(seed: int, levels: int = 2) -> Candidates:
    """Levels of a beam of four with equal scores, -inf and NaN among them."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 0, (2, 4), generator=g).float()
    parents = torch.full((2, 4), -1)
    for level in range(1, levels):
        first = max(0, 4 + (level - 2) * 16)
        chosen = first + torch.arange(4).expand(2, 4) * (1 if level == 1 else 4)
        parents = torch.cat([parents, chosen.repeat_interleave(4, 1)], 1)
        # A child is never likelier than its parent.
        steps = torch.randint(-3, 0, (2, 16), generator=g)
        scores = torch.cat([scores, scores.gather(1, parents[:, -16:]) + steps], 1)
    if levels == 2:
        scores[0, 2] = scores[0, 12:16] = float("nan")
        scores[1, 17:20] = float("-inf")
    count = scores.shape[1]
    return Candidates(torch.arange(2 * count).view(2, count) + 100, scores, parents)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("nodes", [1, 3, 11, 19, 20, 50])
def test_ties_and_nan_rank_as_in_choose_nodes(
    nodes: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSMITH_KERNELS", kernels)
    for seed in range(3):
        found, roots, lengths = candidates(seed), torch.tensor([1, 2]), torch.tensor([5, 6])
        expected = [choose_nodes(*(c[i] for c in found), int(roots[i]), nodes) for i in range(2)]
        assert_are(build(found, roots, lengths, nodes), expected, lengths)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(theirs[None, :] < mine[:, None])", "(theirs[None, :] <= mine[:, None])"),
        ("(theirs[None, :] < mine[:, None])", "(theirs[None, :] > mine[:, None])"),
        ("real & (better < nodes)", "real & (better <= nodes)"),
        # The second block of candidates counted from the beginning.
        ("place = taken + tl.cumsum(kept, 0)", "place = tl.cumsum(kept, 0)"),
        # Ancestors without the root; positions one off.
        ("on_the_way = drafted\n", "on_the_way = drafted & (parents > 0)\n"),
        # Nodes that are not there taken for the root.
        ("& (drafted[None, :] | (node[None, :] == 0))", ""),
        ('return tl.where(scores == scores, scores, float("-inf"))', "return scores"),
    ],
)
def test_a_wrong_build_is_caught(
    old: str, new: str, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    from headsmith.inference.kernels import tree_build_triton

    wrong = mutant(tree_build_triton, old, new)
    roots, lengths = torch.tensor([1, 2]), torch.tensor([5, 6])
    same = True
    # Candidates of one block, with NaN, and of two.
    for found, nodes in ((candidates(0), 11), (candidates(0, levels=8), 63)):
        expected = tree_build.reference_build(found, roots, lengths, nodes)
        made = wrong.launch_build(found, roots, lengths, nodes)
        same = same and all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert not same


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("left & (ranked == high), here, BLOCK), 0)", "(ranked == high), here, BLOCK), 0)"),
        ("left = left & (here != best)", "left = left & (here > best)"),
        ("(first + best).to(tl.int64)", "best.to(tl.int64)"),
        ("(best // K).to(tl.int64)", "(best % K).to(tl.int64)"),
    ],
)
def test_a_wrong_level_is_caught(
    old: str, new: str, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    from headsmith.inference.kernels import tree_build_triton

    wrong = mutant(tree_build_triton, old, new)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, 4, 4), generator=g)
    # Equal scores, and better ones behind worse ones.
    logp = torch.randint(-4, 0, (2, 4, 4), generator=g).float()
    found = Candidates.empty(2, 4, 2, ids.device)
    first = tree_build.reference_grow(ids[:, :1], logp[:, :1], None, found, 0)
    expected = tree_build.reference_grow(ids, logp, first, found, 1)
    made = wrong.launch_grow(ids, logp, first, found, 1)
    assert not all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
