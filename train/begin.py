"""How the weights of a fresh EAGLE head begin, from the target's own states (`head.init`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TypeGuard

from accelerate import Accelerator

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_fit import LinearFit, inputs_of_fit
from headsmith.models.eagle3_init import balance_taps
from headsmith.models.heads import Head
from headsmith.train.batches import Batches, share
from headsmith.train.features import Features
from headsmith.train.progress import Report
from headsmith.train.recipe import HeadSection

# Loss rows that a fit reads for each of its inputs, unless the recipe says how many in all.
ROWS_PER_INPUT = 10


def begin(
    section: HeadSection, features: Features, accelerator: Accelerator, say: Callable[[str], None]
) -> None:
    """Balance the taps of a fresh head in `features`, and fit it where the recipe says so.

    Ranks share the fit's rows and come to the same head. Medusa heads begin as the target, and
    heads that the recipe starts from have begun: both are left as they are.
    """
    head, batches = features.head, features.batches
    if section.init_from is not None or not isinstance(head, Eagle3Head):
        return
    features.wait_for(batches.order(0)[:1].tolist())
    first = features.row(int(batches.order(0)[0]))
    features.target.settle()
    sizes = balance_taps(head, first.taps)
    if not is_fitted(head, section):
        return
    rows = fitted_rows(section, head, batches)
    found = int(batches.counts[rows, 0].sum())
    features.wait_for(rows)
    say(f"head: begins as the best linear guess over {found} rows of {len(rows)} packed ones")
    fit = LinearFit(head, features.target, sizes)
    mine = share(rows, accelerator.process_index, accelerator.num_processes, batches.tokens)
    with Report(len(mine), 0, quiet=not accelerator.is_main_process) as report:
        for done, (index, weight) in enumerate(mine, 1):
            if weight:
                row = features.row(index)
                here = row.rows[0]
                fit.add(
                    row.taps[here], row.ids[here], row.ids[here + 1], row.last[row.slot[here + 1]]
                )
            features.target.settle()
            report.show(done, "fit")
    for total in fit.moments.tensors:
        total.copy_(accelerator.reduce(total, "sum"))
    fit.apply()


def is_fitted(head: Head, section: HeadSection) -> TypeGuard[Eagle3Head]:
    """Whether a run of this recipe fits its head."""
    fresh = section.init_from is None and section.init == "linear"
    return fresh and isinstance(head, Eagle3Head)


def fitted_rows(section: HeadSection, head: Eagle3Head, batches: Batches) -> list[int]:
    """The packed rows of a fit: those that training meets first, until they hold enough loss rows,
    or all.
    """
    wanted = section.fit_rows or ROWS_PER_INPUT * inputs_of_fit(head.config)
    order = batches.order(0).tolist()
    held = accumulate(int(count) for count in batches.counts[order, 0])
    return order[: next((n for n, rows in enumerate(held, 1) if rows >= wanted), len(order))]
