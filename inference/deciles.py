"""Does acceptance decay over a long run? The first tenth of its requests against the last.

Servers were seen to lose half their acceptance within hours (spec/verifier.md 7, entry 30). Tasks
follow one another in a run and later turns come last, so each task's turns are looked at apart:
otherwise a change of task would pass for decay.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from headsmith.inference.metrics import as_steps, summarise
from headsmith.inference.records import Response, Steps
from headsmith.inference.resample import cluster_counts, drawn_sums, interval

# A tenth of fewer requests is too few to tell anything from.
LONG_RUN = 100
_TURN = re.compile(r"#(\d+)$")


def compare_deciles(
    records: Sequence[Steps | Response], *, seed: int = 0
) -> list[dict[str, Any]] | None:
    """A row for each turn of a task with LONG_RUN requests or more; None where none has so many.

    Rows hold `task`, `turn`, `requests` of each tenth, `first_tau`, `last_tau`, `difference` (last
    less first) and its bootstrap interval. Records are in the order in which they ran.
    """
    groups: dict[tuple[str, int], list[Steps]] = defaultdict(list)
    for one in as_steps(records):
        found = _TURN.search(one.id)
        groups[one.task, int(found.group(1)) if found else 1].append(one)
    rows = []
    for (task, turn), group in groups.items():
        if len(group) >= LONG_RUN:
            tenth = len(group) // 10
            row = _row(group[:tenth], group[-tenth:], seed)
            rows.append({"task": task, "turn": turn, "requests": tenth} | row)
    return rows or None


def decile_warnings(rows: list[dict[str, Any]] | None) -> list[str]:
    """A sentence for each row whose acceptance fell by more than chance explains."""
    return [
        f"tau fell from {row['first_tau']:.2f} over the first {row['requests']} requests of "
        f"{row['task']} to {row['last_tau']:.2f} over the last (difference "
        f"{row['difference_ci'][0]:+.2f} .. {row['difference_ci'][1]:+.2f}): either the prompts "
        "grow harder or the decoder decays; measure again with the prompts in another order"
        for row in rows or ()
        if row["difference_ci"] is not None and row["difference_ci"][1] < 0
    ]


def _row(first: list[Steps], last: list[Steps], seed: int) -> dict[str, Any]:
    taus = [summarise(part)["tau"] for part in (first, last)]
    known = taus[0] is not None and taus[1] is not None
    return {
        "first_tau": taus[0],
        "last_tau": taus[1],
        "difference": taus[1] - taus[0] if known else None,  # type: ignore[operator]
        "difference_ci": _difference_interval(first, last, seed) if known else None,
    }


def _difference_interval(first: list[Steps], last: list[Steps], seed: int) -> list[float] | None:
    """The tenths are of different prompts, so each is drawn by itself."""
    taus = []
    for offset, part in enumerate((first, last)):
        counts = np.array(list(cluster_counts(part).values()), dtype=np.float64)
        if len(counts) < 2:
            return None
        drawn = drawn_sums(counts, seed=seed + offset)
        taus.append(drawn[:, 0] / drawn[:, 1])
    return interval(taus[1] - taus[0])
