"""Verification on the device against the rules and the stop rule of the decoder."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from headsmith.inference.accept import Sample, follow
from headsmith.inference.kernels.verify import (
    Choose,
    Limits,
    Nodes,
    reference,
    reference_walk,
    verify,
    walk,
)
from headsmith.inference.noise import Place, gumbel
from headsmith.inference.tree import Tree

VOCAB = 37
SIZES = [2, 1, 4, 18]
CHOICES = [
    Choose("greedy"),
    Choose("sample", 0.7),
    Choose("typical", 0.6, 0.2),
    Choose("typical", 1.3),
]


def a_tree(size: int, chooser: random.Random) -> Tree:
    """Deep, with siblings that may hold the same token; few ids, so that some are accepted."""
    parents = [-1] + [chooser.randint(max(0, node - 4), node - 1) for node in range(1, size)]
    return Tree([chooser.randrange(6) for _ in range(size)], parents)


class Case:
    """Ragged trees, logits of which the first six ids are likely, noise and limits."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        chooser, g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.trees = [a_tree(size, chooser) for size in SIZES]
        tokens = [t for tree in self.trees for t in tree.tokens]
        logits = torch.randn(len(tokens), VOCAB, generator=g)
        logits[:, :6] += 2
        # Half of the nodes are followed by what the target chooses.
        begin = 0
        for tree in self.trees:
            for node, parent in enumerate(tree.parents):
                if parent >= 0 and chooser.random() < 0.6:
                    logits[begin + parent, tree.tokens[node]] += 3
            begin += len(tree)
        self.logits = logits.to(dtype)
        self.logits[0, 7] = self.logits[0, 20] = self.logits[0].max() + 1  # a tie
        self.lengths = torch.tensor([chooser.randint(5, 30) for _ in SIZES])
        self.written = torch.tensor([chooser.randint(1, 4) for _ in SIZES])
        self.places = [
            Place(f"r{i}", int(self.lengths[i]) + d)
            for i, tree in enumerate(self.trees)
            for d in tree.depths
        ]
        keys = sorted(set(self.places), key=lambda p: (p.request, p.position))
        self.noise = torch.stack([gumbel(5, place, VOCAB) for place in keys])
        self.levels = torch.tensor([keys.index(place) for place in self.places])

    @property
    def nodes(self) -> Nodes:
        parents = [p for tree in self.trees for p in tree.parents]
        offsets = torch.tensor([0, *SIZES]).cumsum(0).int()
        tokens = torch.tensor([t for tree in self.trees for t in tree.tokens])
        return Nodes(tokens, torch.tensor(parents).int(), offsets, self.levels, max(SIZES))

    def given(self, choose: Choose, limits: Limits) -> tuple[Any, ...]:
        noise = self.noise if choose.rule == "sample" else None
        return self.logits, self.nodes, choose, noise, self.written, self.lengths, limits


def limits(*stop: int, new: int = 100, context: int = 4000) -> Limits:
    return Limits(torch.tensor(stop, dtype=torch.int64), new, context)


ENDS = [limits(), limits(3), limits(1, 4, new=4), limits(new=3), limits(30, context=22)]


@pytest.mark.parametrize("choose", CHOICES, ids=lambda c: f"{c.rule}{c.temperature}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_kernels_keep_what_the_rules_keep(choose: Choose, dtype: torch.dtype) -> None:
    accepted, reasons = 0, set()
    for seed in range(3):
        case = Case(seed, dtype)
        for end in ENDS:
            found, expected = verify(*case.given(choose, end)), reference(*case.given(choose, end))
            for name, a, b in zip(expected._fields, found, expected, strict=True):
                assert torch.equal(a, b), name
            accepted += int(expected.accepted.sum())
            reasons |= set(expected.reasons.tolist())
    assert accepted >= 8 and reasons == {0, 1, 2, 3}


def test_small_blocks_of_the_vocabulary_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from headsmith.inference.kernels import verify_triton

    monkeypatch.setattr(verify_triton, "BLOCK", 8)
    case = Case(3)
    for choose in CHOICES:
        given = case.given(choose, limits())
        assert all(map(torch.equal, verify(*given), reference(*given)))


def test_known_choices_need_no_logits() -> None:
    for seed, end in enumerate(ENDS):
        case = Case(seed)
        given = case.given(CHOICES[0], end)
        choices = case.logits.argmax(-1)
        found = walk(choices, case.nodes, *given[4:])
        assert all(map(torch.equal, found, reference(*given)))
        assert all(map(torch.equal, found, reference_walk(choices, case.nodes, *given[4:])))


def test_sampled_text_is_that_of_the_rule() -> None:
    """The noise is keyed as the decoder keys it, so the path is the decoder's."""
    case = Case(1)
    found = verify(*case.given(Choose("sample", 0.7), limits()))
    choices = Sample(0.7, seed=5).scores(case.logits, case.places).argmax(-1).split(SIZES)
    for i, (tree, chosen) in enumerate(zip(case.trees, choices, strict=True)):
        kept = follow(tree, chosen.tolist())
        count = len(kept.path)
        assert found.paths[i, :count].tolist() == kept.path
        assert found.tokens[i, count - 1] == kept.bonus
        assert (found.paths[i, count:] == -1).all() and (found.tokens[i, count:] == -1).all()


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        # The stop scan off by one, each way.
        (0, "ours = node <= kept", "ours = node < kept"),
        (
            0,
            "why = tl.where(whole >= max_context, 3, 0)",
            "why = tl.where(whole > max_context, 3, 0)",
        ),
        (
            0,
            "why = tl.where(answer >= max_new_tokens, 2, why)",
            "why = tl.where(answer > max_new_tokens, 2, why)",
        ),
        (0, "committed = tl.minimum(final, kept) + 1", "committed = kept + 1"),
        # Any node that holds the choice; nodes of the next tree.
        (0, "live & (parent == at) & (token == choice)", "live & (token == choice)"),
        (0, "live = node < count", "live = (node < count) | (node < 8)"),
        # The edge of the vocabulary: of equal scores the last.
        (
            0,
            "tl.min(tl.where(top == best, where, vocab), 0)",
            "tl.max(tl.where(top == best, where, 0), 0)",
        ),
        (1, "drawn = noise + tl.load(levels + row) * vocab", "drawn = noise + row * 0"),
        (
            2,
            "above = (begin + tl.where(drafted, parent, 0))",
            "above = (begin + tl.where(drafted, node, 0))",
        ),
        (
            2,
            "new = tl.where(node == place - 1, mine, new)",
            "new = tl.where(node == place, mine, new)",
        ),
    ],
)
def test_a_wrong_kernel_is_caught(
    rule: int, old: str, new: str, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    from headsmith.inference.kernels import verify_triton

    wrong = mutant(verify_triton, old, new)
    cases = []
    for case in map(Case, range(6)):
        # The longest answer ends with its next token.
        exact = limits(context=int(case.lengths.max()) + 1)
        cases += [case.given(CHOICES[rule], end) for end in (exact, *ENDS)]
    results = ((wrong.launch(*given), reference(*given)) for given in cases)
    assert not all(all(map(torch.equal, found, expected)) for found, expected in results)
