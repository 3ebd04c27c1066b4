"""Losslessness by counting: 200,000 draws of each rule on a toy model and a chi-square test of
pairs of tokens, which tells rules that are nearly right (spec/verifier.md 3.2, spec/medusa.md 4.7).

Random numbers are made in one go, for keying each takes longest; that keyed ones are as good is
shown over fewer draws in test_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from headsmith.inference import accept, drawn, ratio
from headsmith.inference.accept import Sample
from headsmith.inference.drafters import Update
from headsmith.inference.noise import Place
from headsmith.inference.ratio import Ratio
from headsmith.inference.sampling import Shaping
from headsmith.inference.tree import Drawn

VOCAB, DRAWS, START = 8, 200_000, 3
IDS = torch.tensor([0, 1, 3, 4, 6])  # what the drafter can say
GENERATOR = torch.Generator().manual_seed(8)
TARGET = torch.randn(VOCAB, VOCAB, generator=GENERATOR)  # logits behind each token
DRAFTER = TARGET[:, IDS] + torch.randn(VOCAB, len(IDS), generator=GENERATOR)
SHAPING = Shaping(top_k=7, top_p=0.95)
RULE = Ratio(0.8, seed=1, shaping=SHAPING)

# p behind each token [V, V], and log q [V, D]
P = RULE.plain.log_weights(TARGET, []).double().softmax(-1).numpy()
LOG_Q = drawn.log_distribution(RULE, DRAFTER)


def worst(pairs: list[tuple[int, int]]) -> float:
    """The p-value of pairs of tokens behind START under the target's own distribution."""
    expected = (P[START][:, None] * P).ravel() * len(pairs)
    counts = np.bincount([a * VOCAB + b for a, b in pairs], minlength=VOCAB * VOCAB)
    assert not counts[expected == 0].any(), "a token that the settings leave out"
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


@pytest.fixture(autouse=True)
def made_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes the next row, whatever its key."""
    generator = torch.Generator().manual_seed(5)

    def rows(size: int) -> Iterator[torch.Tensor]:
        while True:
            waits = torch.empty(50_000, size).exponential_(generator=generator)
            yield from -waits.log()

    def coins() -> Iterator[float]:
        while True:
            yield from torch.rand(50_000, dtype=torch.float64, generator=generator).tolist()

    pool, flips = {size: rows(size) for size in (VOCAB, len(IDS))}, coins()
    for module in (accept, drawn, ratio):
        monkeypatch.setattr(module, "gumbel", lambda seed, place, size, use="": next(pool[size]))
    monkeypatch.setattr(ratio, "coin", lambda seed, place, use: next(flips))


def test_sample() -> None:
    assert worst(sampled(RULE.plain)) > 1e-3
    # A temperature that is off by a fiftieth.
    assert worst(sampled(Sample(0.784, 1, SHAPING))) < 1e-3


def sampled(rule: Sample) -> list[tuple[int, int]]:
    names = [f"text {i}" for i in range(DRAWS // 2)]
    first = rule.scores(TARGET[START].expand(len(names), -1), [Place(n, 0) for n in names])
    tokens = first.argmax(-1)
    second = rule.scores(TARGET[tokens], [Place(n, 1) for n in names]).argmax(-1)
    return list(zip(tokens.tolist(), second.tolist(), strict=True))


def drafted(level: int, tokens: torch.Tensor, names: list[str], width: int) -> torch.Tensor:
    """Columns of `width` draws behind each token [n, width], by the drafters' own noise."""
    updates = [Update(0, [], torch.empty(0), place=Place(name, 0)) for name in names]
    log_q = LOG_Q[tokens]
    noise: torch.Tensor = drawn._noise(RULE, updates, level, log_q)
    return (log_q + noise).topk(width).indices


def by_ratio(width: int, draws: int = DRAWS) -> list[tuple[int, int]]:
    """Pairs of one pass of a tree of `width` children of the root with a child each, and of what
    plain sampling puts behind it where only one token was committed.
    """
    names = [f"text {i}" for i in range(draws // 2)]
    roots = torch.full((len(names),), START)
    first = drafted(0, roots, names, width)
    second = torch.stack(
        [drafted(1, IDS[first[:, child]], names, 1)[:, 0] for child in range(width)], 1
    )
    q = LOG_Q.double().exp()
    parents = [-1, *[0] * width, *range(1, width + 1)]
    pairs = []
    for name, *columns in zip(names, first.tolist(), second.tolist(), strict=True):
        rows = [START, *(int(IDS[c]) for c in columns[0])]
        given = Drawn(IDS, q[rows], [*range(width + 1), *[-1] * width])
        tree = drawn.drawn_tree(START, [*columns[0], *columns[1]], parents, given)
        places = [Place(name, depth) for depth in tree.depths]
        got = ratio.walk(
            tree,
            lambda node, tree=tree: P[tree.tokens[node]],
            lambda node, sibling, x, at=places: RULE.chance(at[node], sibling, x),
            lambda node, p, at=places: RULE.draw(at[node], p),
        )
        text = [*tree.paths[got.path[-1]], got.bonus]
        if len(text) == 1:
            text.append(RULE.draw(Place(name, 1), P[text[0]]))
        pairs.append((text[0], text[1]))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(("width", "draws"), [(1, DRAWS), (3, DRAWS // 4)], ids=["chain", "tree"])
def test_ratio(width: int, draws: int) -> None:
    assert worst(by_ratio(width, draws)) > 1e-3


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "the rest is drawn from p": ("residual", lambda p, q: p),
    "kept a little too often": ("acceptance", lambda p, q: min(1.0, 1.15 * p / q)),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_ratio_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratio, *WRONG[bug])
    assert worst(by_ratio(1, DRAWS // 5)) < 1e-3


def test_the_drafters_draw_from_the_q_that_they_hand_over() -> None:
    """Pairs drawn without replacement: q_a q_b / (1 - q_a)."""
    names = [f"text {i}" for i in range(50_000)]
    columns = drafted(0, torch.full((len(names),), START), names, 2)
    q: NDArray[np.float64] = LOG_Q[START].double().exp().numpy()
    expected = q[:, None] * q / (1 - q[:, None])
    np.fill_diagonal(expected, 0)
    expected = expected.ravel() * len(names)
    counts = (columns[:, 0] * len(q) + columns[:, 1]).bincount(minlength=len(q) ** 2).numpy()
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) > 1e-3
