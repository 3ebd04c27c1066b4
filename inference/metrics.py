"""Every acceptance figure, derived from the integers of the verification passes.

Symbols (spec/verifier.md 1.1), for pass s: P_s drafts proposed, a_s accepted, e_s committed
(after EOS, stop and limits cut it, bonus included), N_s nodes verified; V passes, T output tokens.

    tau                 sum e_s / V, over all passes of all requests (1.4; headline)
    tau_macro           mean over requests of sum e_s / V_r (1.1)
    acceptance_rate     sum a_s / sum P_s (1.1; depends on the depth)
    per_position[i-1]   u_i = passes with a_s >= i, divided by V (1.1)
    conditional[i-1]    c_i = u_i / u_(i-1), with u_0 = 1 (1.1)
    histogram[a]        passes that accepted exactly a drafts (1.4)
    truncated           passes whose e_s < a_s + 1, by what cut them (1.4)
    nodes_per_token     sum N_s / sum e_s, "waste" (1.4)

Identities: tau = 1 + sum u_i where no pass is truncated; sum e_s = T - requests, since the
prefill gives each request its first token; u never rises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from headsmith.inference.records import Pass, Response, Steps
from headsmith.inference.resample import (
    CONFIDENCE,
    RESAMPLES,
    cluster_counts,
    drawn_sums,
    interval,
)


class Truncated(TypedDict):
    """Passes cut short, by the reason; `length` holds the token limit and the context limit."""

    eos: int
    stop: int
    length: int


class Metrics(TypedDict):
    """METRICS of `result.json`; None where the figure has no value (nothing was drafted)."""

    tau: float | None
    tau_ci: list[float] | None
    tau_macro: float | None
    acceptance_rate: float | None
    per_position: list[float]
    conditional: list[float | None]
    histogram: list[int]
    requests: int
    tokens: int
    passes: int
    zero_accept_fraction: float | None
    truncated: Truncated
    nodes_per_token: float | None


class Equivalents(TypedDict):
    """The same passes counted as other projects count them; None without a pass."""

    vllm: float | None
    sglang: float | None
    eagle: float | None
    spec_bench: float | None


def summarise(records: Sequence[Steps | Response], *, seed: int = 0) -> Metrics:
    """METRICS over the passes of all records; `seed` drives the bootstrap of `tau_ci`."""
    steps = as_steps(records)
    passes = [one for record in steps for one in record.passes]
    committed = sum(one.committed for one in passes)
    accepted = sum(one.accepted for one in passes)
    depth = max((one.proposed for one in passes), default=0)
    histogram = np.bincount([one.accepted for one in passes], minlength=depth + 1)
    per_position = unconditional(histogram)
    return Metrics(
        tau=_ratio(committed, len(passes)),
        tau_ci=bootstrap_tau(steps, seed=seed),
        tau_macro=_macro(steps),
        acceptance_rate=_ratio(accepted, sum(one.proposed for one in passes)),
        per_position=per_position,
        conditional=conditional(per_position),
        histogram=[int(count) for count in histogram],
        requests=len(steps),
        tokens=sum(record.output_tokens for record in steps),
        passes=len(passes),
        zero_accept_fraction=_ratio(sum(one.accepted == 0 for one in passes), len(passes)),
        truncated=_truncated(steps),
        nodes_per_token=_ratio(sum(one.nodes for one in passes), committed),
    )


def by_task(records: Sequence[Steps | Response], *, seed: int = 0) -> dict[str, Metrics]:
    """METRICS of each task, in the order in which the tasks first appear."""
    tasks: dict[str, list[Steps]] = defaultdict(list)
    for record in as_steps(records):
        tasks[record.task].append(record)
    return {task: summarise(group, seed=seed) for task, group in tasks.items()}


def as_steps(records: Sequence[Steps | Response]) -> list[Steps]:
    """The counts of responses; `Steps` stay as they are."""
    return [Steps.of(one) if isinstance(one, Response) else one for one in records]


def unconditional(histogram: Sequence[int] | np.ndarray) -> list[float]:
    """u_1 .. u_depth from the counts of passes that accepted 0, 1, .. depth drafts."""
    counts = np.asarray(histogram, dtype=np.int64)
    passes = int(counts.sum())
    if passes == 0:
        return []
    at_least = counts[::-1].cumsum()[::-1]  # at_least[i] = passes with a >= i
    return [float(count / passes) for count in at_least[1:]]


def conditional(per_position: Sequence[float]) -> list[float | None]:
    """c_i = u_i / u_(i-1); None where no pass came as far as position i."""
    before = [1.0, *per_position]
    return [_ratio(u, previous) for u, previous in zip(per_position, before, strict=False)]


def bootstrap_tau(
    records: Sequence[Steps | Response],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> list[float] | None:
    """Percentile interval [lo, hi] of tau from resampling whole conversations.

    Turns of one conversation correlate, so the conversation is the cluster (spec/verifier.md 6.5).
    None with fewer than two conversations that have a pass.
    """
    clusters = cluster_counts(as_steps(records))
    if len(clusters) < 2:
        return None
    counts = np.array(list(clusters.values()), dtype=np.float64)  # [clusters, (committed, passes)]
    drawn = drawn_sums(counts, seed=seed, draws=resamples)
    return interval(drawn[:, 0] / drawn[:, 1], confidence)


def equivalents(records: Sequence[Steps | Response]) -> Equivalents:
    """The passes in other projects' conventions (spec/verifier.md 1.2).

    vllm: 1 + sum a / passes that had drafts; drafts accepted beyond the end count.
    sglang: T / V, output tokens with the prefill's token over verification passes.
    eagle: new_tokens / (idx + 1), where each pass adds a + 1 and nothing is cut at EOS.
    spec_bench: the mean over all passes of a + 1 (its EAGLE-2/3 and Medusa runners do not cut).
    """
    steps = as_steps(records)
    passes = [one for record in steps for one in record.passes]
    drafted = [one for one in passes if one.proposed > 0]
    uncut = sum(one.accepted + 1 for one in passes)
    return Equivalents(
        vllm=_ratio(sum(one.accepted + 1 for one in drafted), len(drafted)),
        sglang=_ratio(sum(record.output_tokens for record in steps), len(passes)),
        eagle=_ratio(uncut, len(passes)),
        spec_bench=_ratio(uncut, len(passes)),
    )


def _macro(steps: Sequence[Steps]) -> float | None:
    taus = [
        sum(one.committed for one in record.passes) / len(record.passes)
        for record in steps
        if record.passes
    ]
    return float(np.mean(taus)) if taus else None


def _truncated(steps: Sequence[Steps]) -> Truncated:
    cut = Truncated(eos=0, stop=0, length=0)
    for record in steps:
        if record.passes and _is_cut(record.passes[-1]):
            if record.finish_reason == "eos":
                cut["eos"] += 1
            elif record.finish_reason == "stop":
                cut["stop"] += 1
            else:
                cut["length"] += 1
    return cut


def _is_cut(one: Pass) -> bool:
    return one.committed < one.accepted + 1


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
