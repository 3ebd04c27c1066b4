"""The interval keeps its word: 95 percent of the intervals hold the tau of all prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headsmith.inference.metrics import bootstrap_tau, summarise
from headsmith.inference.records import Steps

SETS, PROMPTS = 200, 40


@pytest.fixture(scope="module")
def everything(drawn: Callable[..., list[Steps]]) -> list[list[Steps]]:
    """600 conversations of two turns, whose chance differs much from one to the next."""
    records = drawn(3, 600, turns=2, alpha=0.6, spread=0.15)
    return [records[i : i + 2] for i in range(0, len(records), 2)]


def coverage(everything: list[list[Steps]], tell_apart: Callable[[Steps, Any], str]) -> float:
    """Share of SETS resampled sets of PROMPTS conversations whose interval holds the whole tau.

    `tell_apart` names the cluster of a record, given the number of its draw.
    """
    whole = summarise([one for turns in everything for one in turns])["tau"]
    draw = random.Random(5)
    held = 0
    for seed in range(SETS):
        some = [
            replace(one, id=tell_apart(one, number))
            for number, turns in enumerate(draw.choices(everything, k=PROMPTS))
            for one in turns
        ]
        interval = bootstrap_tau(some, seed=seed, resamples=500)
        assert whole is not None and interval is not None
        held += interval[0] <= whole <= interval[1]
    return held / SETS


@pytest.mark.slow
def test_the_interval_holds_the_whole_tau_as_often_as_it_says(
    everything: list[list[Steps]],
) -> None:
    share = coverage(everything, lambda one, number: f"{number}#{one.id.rpartition('#')[2]}")
    assert 0.90 <= share <= 0.98


@pytest.mark.slow
def test_turns_drawn_apart_would_promise_too_much(everything: list[list[Steps]]) -> None:
    share = coverage(everything, lambda one, number: f"{number}-{one.id.replace('#', '-')}")
    assert share < 0.90
