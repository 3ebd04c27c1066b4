"""Arrival patterns and the queue of those that wait."""

from __future__ import annotations

import time

import numpy as np
import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.arrival import Arrival, Queue, parse_arrival
from headsmith.inference.records import Request


def some(count: int) -> list[Request]:
    return [Request(str(i), "task", [1]) for i in range(count)]


def test_patterns() -> None:
    assert parse_arrival("all").times(3) == [0, 0, 0]
    assert parse_arrival("constant:4").times(3) == [0, 0.25, 0.5]
    assert parse_arrival("poisson:2.5", seed=3).times(0) == []


def test_poisson_gaps_are_exponential_and_of_the_seed() -> None:
    times = parse_arrival("poisson:50", seed=1).times(4000)
    gaps = np.diff(times)
    assert times[0] == 0 and min(gaps) >= 0
    # The mean of an exponential is its deviation.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    assert times == parse_arrival("poisson:50", seed=1).times(4000)
    assert times != parse_arrival("poisson:50", seed=2).times(4000)


@pytest.mark.parametrize("text", ["all", "constant:4", "poisson:2.5"])
def test_a_pattern_writes_itself(text: str) -> None:
    assert str(parse_arrival(text)) == text


@pytest.mark.parametrize(
    "text", ["", "al", "all:2", "constant", "poisson:", "poisson:0", "constant:-1", "poisson:inf"]
)
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(HeadsmithError, match="give all, constant:RATE or poisson:RATE"):
        parse_arrival(text)


def test_the_queue_gives_what_has_arrived() -> None:
    queue = Queue(some(3), Arrival("constant", 20.0))
    assert [one.place for one in queue.take(3)] == [0], "the second comes after 50 ms"
    begin = time.perf_counter()
    queue.sleep()
    assert [one.place for one in queue.take(0)] == []
    assert [one.place for one in queue.take(3)] == [1]
    assert time.perf_counter() - begin > 0.02
    assert queue
    queue.sleep()
    assert [one.place for one in queue.take(9)] == [2] and not queue


def test_all_at_once_are_taken_in_their_order() -> None:
    queue = Queue(some(5), Arrival())
    assert [one.place for one in queue.take(2)] == [0, 1]
    assert [one.place for one in queue.take(9)] == [2, 3, 4]
