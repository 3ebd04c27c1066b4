"""Losslessness by enumeration: every way that decoding can go, with exact fractions, adds up to the
distribution of plain sampling; a rule that is wrong in one step does not (spec/verifier.md 3.2).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headsmith.inference import ratio
from headsmith.inference.accept import Sample
from headsmith.inference.tree import Drawn, Tree

VOCAB = 4
Text = tuple[int, ...]
Law = dict[Text, Fraction]
# choose(pairs of a value and its probability) -> one of the values
Choose = Callable[[Iterable[tuple[Any, Fraction]]], Any]


class _Going:
    """One way to go: the answers `made` and from there on the first that are possible; the others
    are put down in `waiting`.
    """

    def __init__(self, made: list[int], waiting: list[list[int]]) -> None:
        self.made, self.waiting = made, waiting
        self.weight, self.number = Fraction(1), 0

    def choose(self, options: Iterable[tuple[Any, Fraction]]) -> Any:
        possible = [(value, Fraction(chance)) for value, chance in options if chance > 0]
        if self.number == len(self.made):
            self.waiting.extend([*self.made, other] for other in range(1, len(possible)))
            self.made.append(0)
        value, chance = possible[self.made[self.number]]
        self.number += 1
        self.weight *= chance
        return value


def law(run: Callable[[Choose], Text]) -> Law:
    """The distribution of what `run` gives, over everything that `choose` may answer."""
    total: Law = defaultdict(Fraction)
    waiting: list[list[int]] = [[]]
    while waiting:
        going = _Going(waiting.pop(), waiting)
        total[run(going.choose)] += going.weight
    assert sum(total.values()) == 1
    return dict(total)


def fractions(seed: str, zeros: int) -> list[Fraction]:
    """A random distribution over the vocabulary, `zeros` of its tokens impossible."""
    chooser = random.Random(seed)
    weights = [Fraction(chooser.randint(1, 9)) for _ in range(VOCAB)]
    for token in chooser.sample(range(VOCAB), zeros):
        weights[token] = Fraction(0)
    return [weight / sum(weights) for weight in weights]


@cache
def target(text: Text) -> list[Fraction]:
    """p behind a text; now and then a token is impossible."""
    return fractions(f"p {text}", zeros=len(text) % 2)


@cache
def drafter(text: Text) -> list[Fraction]:
    """q behind a text: token 2 is not in the draft vocabulary."""
    q = fractions(f"q {text}", zeros=0)
    q[2] = Fraction(0)
    return [chance / sum(q) for chance in q]


def plain(length: int) -> Law:
    """The distribution of texts of plain sampling."""
    texts: Law = {(): Fraction(1)}
    for _ in range(length):
        texts = {
            (*text, token): weight * chance
            for text, weight in texts.items()
            for token, chance in enumerate(target(text))
            if chance
        }
    return texts


def drawn_tree(choose: Choose, text: Text, widths: tuple[int, ...]) -> Tree:
    """A tree behind `text`, children drawn without replacement, one after the other."""
    tokens, parents, texts, rows, q = [-1], [-1], [text], [], []
    for node in range(1 + sum(int(np.prod(widths[: m + 1])) for m in range(len(widths)))):
        depth = len(texts[node]) - len(text)
        if depth == len(widths):
            rows.append(-1)
            continue
        rows.append(len(q))
        q.append(drafter(texts[node]))
        left = dict(enumerate(q[-1]))
        for _ in range(widths[depth]):
            mass = sum(left.values())
            token = choose((t, chance / mass) for t, chance in left.items())
            del left[token]
            tokens.append(token)
            parents.append(node)
            texts.append((*texts[node], token))
    ids: Any = [0, 1, 3]
    columns: Any = np.array(q, dtype=object)[:, ids]
    return Tree(tokens, parents, Drawn(ids, columns, rows))


def speculate(
    choose: Choose, length: int, draft: Callable[[Choose, Text], Tree], passes: int
) -> Text:
    """`passes` passes of rule `ratio` behind the empty text, then plain sampling."""
    text: Text = ()
    while len(text) < length and passes:
        before, tree = text, draft(choose, text)
        accepted = ratio.walk(
            tree,
            lambda node, tree=tree, before=before: np.array(
                target((*before, *tree.paths[node])), dtype=object
            ),
            lambda node, sibling, x: choose([(True, Fraction(x)), (False, 1 - Fraction(x))]),
            lambda node, p: choose(enumerate(p)),
        )
        text = (*text, *tree.paths[accepted.path[-1]], accepted.bonus)
        passes -= 1
    while len(text) < length:
        text = (*text, choose(enumerate(target(text))))
    return text[:length]


FORMS = {
    "chain": ((1, 1), 2, 2),
    "deep chain": ((1, 1, 1), 3, 1),
    "siblings": ((3,), 2, 2),
    "tree": ((2, 1), 3, 1),
    "full tree": ((2, 2), 3, 1),
}


def by_ratio(form: str) -> tuple[Law, Law]:
    """What rule ratio gives, and what it should."""
    widths, length, passes = FORMS[form]
    got = law(
        lambda choose: speculate(choose, length, lambda c, t: drawn_tree(c, t, widths), passes)
    )
    return got, plain(length)


SLOW = ("tree", "full tree")


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FORMS]
)
def test_ratio_is_lossless(form: str) -> None:
    got, expected = by_ratio(form)
    assert got == expected


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "what is left is p": ("residual", lambda p, q: p),
    "what is left is not cut at p": ("residual", lambda p, q: ratio.normalised(abs(p - q))),
    "everything possible is kept": ("acceptance", lambda p, q: 1 if p > 0 else 0),
    "kept by p alone": ("acceptance", lambda p, q: p),
    "q forgets its draws": ("without", lambda q, token: q),
}


@pytest.mark.parametrize(
    ("form", "bug"),
    # A chain has one draw of each distribution: there is nothing to forget.
    [("chain", bug) for bug in list(WRONG)[:-1]] + [("siblings", bug) for bug in WRONG],
)
def test_a_wrong_ratio_is_found(form: str, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratio, *WRONG[bug])
    got, expected = by_ratio(form)
    assert got != expected


P, Q = ([Fraction(n, 10) for n in row] for row in ([5, 2, 2, 1], [2, 5, 2, 1]))


def two_children(order: Callable[[list[int]], list[int]], drawn: bool = True) -> list[Fraction]:
    """What one pass emits first of two children of P, Q (spec/medusa.md 4.5), and the chance that a
    child is kept.
    """

    def run(choose: Choose) -> Text:
        if drawn:
            first = choose(enumerate(Q))
            rest = [(t, q / (1 - Q[first])) for t, q in enumerate(Q) if t != first]
            tokens = order([first, choose(rest)])
        else:
            tokens = order([1, 0])
        columns: Any = np.array([Q], dtype=object)
        ids: Any = [0, 1, 2, 3]
        tree = Tree([-1, *tokens], [-1, 0, 0], Drawn(ids, columns, [0, -1, -1]))
        got = ratio.walk(
            tree,
            lambda node: np.array(P, dtype=object),
            lambda node, sibling, x: choose([(True, Fraction(x)), (False, 1 - Fraction(x))]),
            lambda node, p: choose(enumerate(p)),
        )
        kept = len(got.path) - 1
        return (tree.tokens[got.path[1]] if kept else got.bonus, kept)

    outcomes = law(run)
    emitted = [sum(w for (t, _), w in outcomes.items() if t == token) for token in range(VOCAB)]
    return [*map(Fraction, emitted), Fraction(sum(w for (_, k), w in outcomes.items() if k))]


def test_the_worked_example_of_two_draws() -> None:
    assert two_children(lambda tokens: tokens) == [*P, Fraction(82, 100)]
    reverse = two_children(lambda tokens: tokens[::-1])[:VOCAB]
    assert [round(float(x), 3) for x in reverse] == [0.456, 0.122, 0.272, 0.150]
    by_q = two_children(lambda tokens: sorted(tokens, key=lambda t: (-Q[t], t)))[:VOCAB]
    assert by_q != P and by_q[3] == 0
    assert two_children(lambda tokens: tokens, drawn=False)[:VOCAB] != P


class _Draws:
    """The target's draws behind each node of a tree, made when they are read."""

    def __init__(self, choose: Choose, text: Text, tree: Tree, keep: bool) -> None:
        self.choose, self.text, self.tree, self.keep = choose, text, tree, keep
        self.known: dict[int, int] = {}

    def __getitem__(self, node: int) -> int:
        p = target((*self.text, *self.tree.paths[node]))
        drawn: int = self.known[node] if node in self.known else self.choose(enumerate(p))
        if self.keep:
            self.known[node] = drawn
        return drawn


def by_sample(tree: Tree, keep: bool, length: int = 3) -> Law:
    """What rule sample gives with the same drafts in every pass."""

    def run(choose: Choose) -> Text:
        text: Text = ()
        while len(text) < length:
            draws: Any = _Draws(choose, text, tree, keep)
            accepted = Sample(1.0).accept(tree, torch.empty(0), draws, [])
            text = (*text, *tree.paths[accepted.path[-1]], accepted.bonus)
        return text[:length]

    return law(run)


# A chain, and a tree with two siblings of one token.
TREES = [Tree.chain([-1, 0, 1]), Tree([-1, 0, 1, 1, 2, 0], [-1, 0, 0, 0, 1, 3])]


@pytest.mark.parametrize("tree", TREES, ids=["chain", "tree"])
def test_sample_is_lossless(tree: Tree) -> None:
    assert by_sample(tree, keep=True) == plain(3)


def test_a_draw_that_is_made_again_is_found() -> None:
    """The bug of p(2 - p): a draw that hits no draft is dropped, and the token drawn anew."""
    assert by_sample(TREES[0], keep=False) != plain(3)


@pytest.mark.parametrize("tree", TREES, ids=["chain", "tree"])
def test_ratio_without_draws_is_lossless(tree: Tree) -> None:
    """Drafts that nobody drew count as certain ones."""
    got = law(lambda choose: speculate(choose, 3, lambda c, t: tree, 2))
    assert got == plain(3)


def test_nothing_is_left_over_where_p_is_q() -> None:
    """No draft is refused, and rounding that refuses one all the same finds a distribution."""
    p = np.array([0.3, 0.7])
    assert ratio.acceptance(p[0], p[0]) == 1
    assert (ratio.residual(p, p) == p).all()
    assert (ratio.without(np.array([0.0, 1.0]), 1) == 0).all()
    assert ratio.acceptance(0.0, 0.0) == ratio.acceptance(0.0, 0.5) == 0
    assert ratio.acceptance(0.5, 0.0) == 0
