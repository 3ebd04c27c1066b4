"""How many more prompts would make an interval half as wide, computed from the bootstrap.

Draws of m conversations instead of the n that were measured show how wide the interval would be
with m of the same kind. The width falls with the square root of m, so one look at 4n and a
correction by what was seen there is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from headsmith.inference.metrics import as_steps
from headsmith.inference.records import Response, Steps
from headsmith.inference.resample import cluster_counts, drawn_sums, interval

# The spread of fewer conversations is itself too uncertain to plan with.
FEWEST = 10
# A small difference between two heads can ask for any number; beyond this it is none to plan with.
MOST_PROMPTS = 100_000


class Advice(TypedDict):
    """`half_width` of the interval of tau from `conversations`, and how many more halve it."""

    conversations: int
    half_width: float
    more_to_halve: int


def advise(records: Sequence[Steps | Response], *, seed: int = 0) -> Advice | None:
    """Advice for the tau of these records; None from fewer than FEWEST conversations, and where
    there is no interval to halve.
    """
    clusters = cluster_counts(as_steps(records))
    if len(clusters) < FEWEST:
        return None
    counts = np.array(list(clusters.values()), dtype=np.float64)
    now = _width(counts, len(counts), seed)
    if now == 0:
        return None
    return Advice(
        conversations=len(counts),
        half_width=now / 2,
        more_to_halve=_more(len(counts), _size_for(counts, now / 2, seed)),
    )


def advise_all(records: Sequence[Steps | Response], *, seed: int = 0) -> dict[str, Any]:
    """{"overall": Advice, "tasks": {task: Advice}}."""
    steps = as_steps(records)
    tasks = dict.fromkeys(one.task for one in steps)
    return {
        "overall": advise(steps, seed=seed),
        "tasks": {
            task: advise([one for one in steps if one.task == task], seed=seed) for task in tasks
        },
    }


def more_to_tell_apart(clusters: int, difference: float, ci: list[float]) -> int | None:
    """More conversations after which the interval of a paired difference of this size would no
    longer hold 0; None where it does not hold it now, or no practical number would do.
    """
    if not ci[0] <= 0 <= ci[1]:
        return None
    reach = difference - ci[0] if difference > 0 else ci[1] - difference
    if difference == 0 or (reach / difference) ** 2 * clusters > MOST_PROMPTS:
        return None
    return _more(clusters, clusters * (reach / difference) ** 2)


def advice_line(advice: dict[str, Any] | None) -> str:
    """The advice as a sentence; empty where there is none."""
    if not advice or not advice["overall"]:
        return ""
    overall = advice["overall"]
    line = (
        f"tau is known to +-{overall['half_width']:.2f} from {overall['conversations']} "
        f"conversations: about {overall['more_to_halve']} more prompts would halve this interval"
    )
    tasks = {name: one for name, one in advice["tasks"].items() if one}
    if len(advice["tasks"]) > 1 and tasks:
        line += "; of each task alone: " + ", ".join(
            f"{name} +-{one['half_width']:.2f}, {one['more_to_halve']} more"
            for name, one in tasks.items()
        )
    return line


def _size_for(counts: np.ndarray, width: float, seed: int) -> float:
    """Conversations whose interval would be as wide as `width`."""
    guess = 4 * len(counts)
    return guess * (_width(counts, guess, seed) / width) ** 2


def _width(counts: np.ndarray, size: int, seed: int) -> float:
    drawn = drawn_sums(counts, seed=seed, size=size)
    low, high = interval(drawn[:, 0] / drawn[:, 1])
    return high - low


def _more(now: int, needed: float) -> int:
    """What is missing, rounded up to tens: the estimate is no better than that."""
    return 10 * max(1, math.ceil((needed - now) / 10))
