"""Sampling settings: what transformers makes of them, at every node by the text before it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headsmith.errors import HeadsmithError
from headsmith.inference import processors
from headsmith.inference.accept import Greedy, Sample
from headsmith.inference.equality import _is_tie
from headsmith.inference.noise import Place
from headsmith.inference.processors import adjust, cut
from headsmith.inference.sampling import PLAIN, Shaping, in_words
from headsmith.inference.tree import Tree

VOCAB = 40


def logits(rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_the_order_is_that_of_transformers(temperature: float) -> None:
    shaping = Shaping(bias=((3, 2.0), (7, -1.5)), repetition=1.3, top_k=15, top_p=0.85, min_p=0.02)
    prompt, written, path = (3, 5, 5), [9, 3], (11, 7)
    text = torch.tensor([[*prompt, *written, *path]])
    for seed in range(20):
        given = logits(1, seed)
        expected = given
        for step in (
            SequenceBiasLogitsProcessor([[[3], 2.0], [[7], -1.5]]),
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(15),
            TopPLogitsWarper(0.85),
            MinPLogitsWarper(0.02),
        ):
            expected = step(text, expected)
        place = Place("a", 7, prompt, written, path)
        got = Sample(temperature, shaping=shaping).log_weights(given, [place])
        torch.testing.assert_close(got, expected)
        assert 1 <= int(got.isfinite().sum()) < 16


def test_presence_and_frequency_count_what_was_written() -> None:
    """vLLM's: minus frequency times count minus presence, on the output alone."""
    shaping = Shaping(presence=0.5, frequency=0.25)
    place = Place("a", 6, prompt=(1, 2), written=[2, 4], path=(4,))
    change = (adjust(shaping, logits(1), [place]) - logits(1))[0]
    expected = torch.zeros(VOCAB)
    expected[2], expected[4] = -0.75, -1.0
    torch.testing.assert_close(change, expected)


def test_repetition_makes_less_likely_on_either_side_of_zero() -> None:
    given = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    got = adjust(Shaping(repetition=2.0), given, [Place("a", 2, prompt=(0, 0), written=[1])])
    assert got.tolist() == [[1.0, -4.0, 2.0, -2.0]] and given[0, 0] == 2


def test_every_node_is_changed_by_its_own_text() -> None:
    """All rows of a tree at once are the rows of plain decoding behind each path, one by one."""
    tree = Tree([5, 8, 9, 8, 8], [-1, 0, 0, 1, 2])
    shaping = Shaping(repetition=1.4, presence=0.3, frequency=0.2, top_p=0.9, min_p=0.01)
    rule, rows = Sample(0.7, seed=2, shaping=shaping), logits(len(tree), 4)
    prompt, written = (1, 8), [7, 5]
    places = [Place("a", 4 + len(p), prompt, written, p) for p in tree.paths]
    together = rule.scores(rows, places)
    for node, path in enumerate(tree.paths):
        plain = Place("a", 4 + len(path), prompt, [*written, *path])
        assert torch.equal(together[node], rule.scores(rows[node : node + 1], [plain])[0])
    # Nodes 3 and 4 hold one token behind other ancestors; 3 has written it twice.
    torch.testing.assert_close(
        adjust(shaping, rows, places)[3, 8] - adjust(shaping, rows[[4] * 5], places[4:] * 5)[0, 8],
        adjust(shaping, rows[3:4], [places[3]])[0, 8]
        - adjust(shaping, rows[4:], [places[4]])[0, 8],
    )


def test_settings_that_are_off_change_nothing() -> None:
    given = logits(3).double()
    place = Place("a", 2, (1,), [2])
    assert Greedy().scores(given, [place] * 3) is given
    assert torch.equal(Sample(1.0).log_weights(given, [place] * 3), given.float())
    assert cut(PLAIN, given, slack=0.3) is given
    assert not PLAIN.adjusts and not PLAIN.cuts and not any(PLAIN.describe().values())
    # More than there are, and everything.
    wide = Shaping(top_k=VOCAB + 1, top_p=1.0)
    assert torch.equal(cut(wide, given.float()), given.float())


def test_the_likeliest_always_stays() -> None:
    for shaping in (Shaping(top_k=1), Shaping(top_p=1e-9), Shaping(min_p=1.0)):
        kept = cut(shaping, logits(50)).isfinite()
        assert kept.sum(-1).tolist() == [1] * 50
        assert torch.equal(kept.int().argmax(-1), logits(50).argmax(-1))
    # Of equal ones top-p keeps the lower ids.
    assert cut(Shaping(top_p=0.5), torch.zeros(1, 4)).isfinite().tolist() == [
        [True] * 2 + [False] * 2
    ]


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9, 0.999])
def test_a_nucleus_needs_no_whole_sort(mass: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    spreads = torch.tensor([0.0, 0.5, 2.0, 6.0]).repeat_interleave(3)[:, None]
    rows = torch.randn(12, 5000, generator=generator) * spreads
    # One of three with ties, one with most tokens left out.
    rows[1::3] = rows[1::3].round()
    rows[2::3] = rows[2::3].masked_fill(rows[2::3] < rows[2::3].median(), -math.inf)
    found = cut(Shaping(top_p=mass), rows).isfinite()
    alone = torch.cat([cut(Shaping(top_p=mass), row[None]).isfinite() for row in rows])
    assert torch.equal(found, alone)
    monkeypatch.setattr(processors, "LIKELIEST", rows.shape[1])
    whole = cut(Shaping(top_p=mass), rows).isfinite()
    # Sums of thousands of probabilities are rounded in another order, so the last may differ.
    assert ((found != whole).sum(-1) <= 1).all()
    ties = (rows.round() == rows).all(-1) & (rows.amax(-1) > rows.amin(-1))
    assert ties.sum() == 3 and (found.sum(-1) >= 1).all()
    for row, kept in zip(rows, found, strict=True):
        bar = row[kept].min()
        assert (row > bar).logical_and(~kept).sum() == 0
        at_bar = (row == bar).nonzero().flatten()
        assert kept[at_bar].int().diff().le(0).all(), "of equal ones the lower ids"


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(HeadsmithError, match="names token 40 and the target's ids end at 39"):
        adjust(Shaping(bias=((40, 1.0),)), logits(1), [Place("a", 0)])


def test_greedy_takes_the_argmax_of_what_bias_and_penalties_leave() -> None:
    given = logits(1)
    best, second = given[0].topk(2).indices.tolist()
    place = Place("a", 1, prompt=(0,), written=[best])
    assert Greedy().scores(given, [place]).argmax() == best
    assert Greedy(Shaping(presence=50.0)).scores(given, [place]).argmax() == second
    forbidden = Greedy(Shaping(bias=((best, -100.0),)))
    assert forbidden.scores(given, [place]).argmax() == second


def test_the_settings_in_words() -> None:
    shaping = Shaping(top_p=0.9, repetition=1.1, bias=((3, 1.0), (4, 1.0)))
    assert in_words(shaping.describe()) == [
        "top-p 0.9",
        "repetition-penalty 1.1",
        "logit-bias of 2 ids",
    ]
    assert in_words({}) == []


CUTS: list[dict[str, Any]] = [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}]


@pytest.mark.parametrize("settings", [*CUTS, {"top_k": 8, "top_p": 0.8, "min_p": 0.1}], ids=str)
def test_bounds_hold_what_rounding_may_keep(settings: dict[str, Any]) -> None:
    """For scores that are off by up to 0.1 against each other: what is kept lies within the outer
    bound and holds the inner one; both bounds are near.
    """
    shaping, given = Shaping(**settings), logits(300, 6, spread=1.0)
    outer, inner = (cut(shaping, given, slack).isfinite() for slack in (0.1, -0.1))
    for seed in range(5):
        off = torch.rand(given.shape, generator=torch.Generator().manual_seed(seed)) * 0.1 - 0.05
        kept = cut(shaping, given + off).isfinite()
        assert not (kept & ~outer).any() and not (inner & ~kept).any()
    assert (outer & ~inner).sum() < 0.5 * outer.sum()


@pytest.mark.parametrize("settings", CUTS, ids=str)
def test_rounding_at_a_bound_is_a_tie_and_another_token_is_not(settings: dict[str, Any]) -> None:
    rule, margin = Sample(1.0, shaping=Shaping(**settings)), 0.02
    given = logits(400, 7, spread=1.0)
    places = [Place("a", i) for i in range(400)]
    own = rule.scores(given, places).argmax(-1)
    off = (torch.rand(given.shape, generator=torch.Generator().manual_seed(1)) - 0.5) * margin
    rounded = rule.scores(given + off, places).argmax(-1)
    changed = (rounded != own).nonzero()[:, 0].tolist()
    assert changed, "rounding that changes nothing shows nothing"
    for i in changed:
        assert _is_tie(rule, given[i : i + 1], places[i], int(rounded[i]), margin)
    # What was cut off far from the bound is a fault.
    least = int(given[0].argmin())
    assert math.isinf(float(rule.scores(given[:1], places[:1])[0, least]))
    assert not _is_tie(rule, given[:1], places[0], least, margin)
