"""When requests arrive: all at once, at equal distances, or by chance as those of many users do.

    all             the whole set at the start: a job's throughput
    constant:RATE   RATE requests a second, evenly
    poisson:RATE    the same on average, with exponential gaps: what a server meets

Plain and drafted decoding meet the same arrivals, so their waiting times can be compared.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from headsmith.errors import HeadsmithError
from headsmith.inference.records import Request

Pattern = Literal["all", "constant", "poisson"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A pattern; `rate` in requests a second (`all` has none), `seed` of the chance."""

    pattern: Pattern = "all"
    rate: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.pattern if self.rate is None else f"{self.pattern}:{self.rate:g}"

    def times(self, count: int) -> list[float]:
        """Seconds from the start at which each of `count` requests arrives, ascending; the first
        at 0.
        """
        if self.rate is None:
            return [0.0] * count
        gaps = np.full(count, 1 / self.rate)
        if self.pattern == "poisson":
            gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, count)
        times: list[float] = (gaps.cumsum() - gaps[:1].sum()).tolist()
        return times


def parse_arrival(text: str, seed: int = 0) -> Arrival:
    """`all`, `constant:RATE` or `poisson:RATE`; HeadsmithError for anything else."""
    pattern, _, rate = text.partition(":")
    try:
        if pattern == "all" and not rate:
            return Arrival()
        if pattern in get_args(Pattern)[1:] and 0 < float(rate) < math.inf:
            return Arrival(pattern, float(rate), seed)  # type: ignore[arg-type]
    except ValueError:
        pass
    raise HeadsmithError(
        f"arrival {text!r} is no pattern; give all, constant:RATE or poisson:RATE, with RATE in "
        "requests a second, such as poisson:2.5"
    )


class Waiting(NamedTuple):
    """A request in the queue, its place among all, and when it arrives, by `perf_counter`."""

    place: int
    request: Request
    arrived: float


class Queue:
    """Requests in the order of their arrival, from now on."""

    def __init__(self, requests: Sequence[Request], arrival: Arrival) -> None:
        start, times = time.perf_counter(), arrival.times(len(requests))
        self._waiting = deque(
            Waiting(index, request, start + at)
            for index, (request, at) in enumerate(zip(requests, times, strict=True))
        )

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, count: int) -> list[Waiting]:
        """The first `count` requests, or those of them that have arrived by now."""
        now = time.perf_counter()
        taken: list[Waiting] = []
        while len(taken) < count and self._waiting and self._waiting[0].arrived <= now:
            taken.append(self._waiting.popleft())
        return taken

    def sleep(self) -> None:
        """Until the next arrival."""
        if self._waiting:
            time.sleep(max(0.0, self._waiting[0].arrived - time.perf_counter()))
