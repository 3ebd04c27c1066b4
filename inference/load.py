"""A run under load: where each request's time went, what a queue made of it, what memory it took.

A row of `speed` has a `load` where an arrival pattern was given (`headsmith.inference.arrival`):

    arrival              the pattern; the row's `batch` is the limit of concurrent requests
    drafted, plain       FLOW of each decoder; `plain` None without a baseline
      FLOW = seconds, requests_per_s, output_tokens_per_s (all output, prefill's token too), running
             (mean of the requests in a round), and p50, p95, p99 in ms of
             queue, prefill, decode  of a request: waiting for a slot, to its first token, after it
             ttft                    from its arrival to its first token: queue + prefill
             itl                     between tokens, shared by the tokens of a commit
             latency                 from its arrival to its last token
    speedup              output_tokens_per_s over plain's. Where requests arrive more slowly than
                         either can decode, it is 1, and the latencies say what is gained
    predicted_speedup    tau / (c_v + c_d + c_o) from the median full round (spec/verifier.md 4.4):
                         what the run would gain if its slots were always full and no prompt read
    identical            outputs that are the plain decoder's token for token
    memory               bytes at the peak: target, cache (keys and values of the target), head,
                         head_cache (the drafter's), workspace (the rest that measuring took)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headsmith.inference.arrival import Arrival
from headsmith.inference.records import Response, Round
from headsmith.inference.speed import Arm, gaps_ms, percentiles, ratio


def load_row(
    drafted: Arm, plain: Arm | None, *, batch: int, arrival: Arrival, memory: dict[str, Any]
) -> dict[str, Any]:
    """The `load` of a row of `speed`."""
    mine = flow(drafted)
    theirs = flow(plain) if plain is not None else None
    row: dict[str, Any] = {"arrival": str(arrival), "drafted": mine, "plain": theirs}
    row["speedup"] = theirs and ratio(mine["output_tokens_per_s"], theirs["output_tokens_per_s"])
    row["predicted_speedup"] = predict(drafted, plain, batch) if plain is not None else None
    row["identical"] = None
    if plain is not None:
        pairs = zip(drafted.responses, plain.responses, strict=True)
        row["identical"] = sum(a.output_ids == b.output_ids for a, b in pairs)
    return row | {"memory": memory}


def flow(arm: Arm) -> dict[str, Any]:
    """FLOW of a decoder's run."""
    responses = arm.responses
    running = [one.running for one in arm.rounds]
    output = sum(len(one.output_ids) for one in responses)
    return {
        "seconds": arm.seconds,
        "requests_per_s": ratio(len(responses), arm.seconds),
        "output_tokens_per_s": ratio(output, arm.seconds),
        "running": float(np.mean(running)) if running else None,
        "queue_ms": percentiles(1000 * one.queue_s for one in responses),
        "prefill_ms": percentiles(1000 * one.prefill_s for one in responses),
        "decode_ms": percentiles(1000 * one.decode_s for one in responses),
        "ttft_ms": percentiles(1000 * (one.queue_s + one.prefill_s) for one in responses),
        "itl_ms": percentiles(gaps_ms(responses)),
        "latency_ms": percentiles(1000 * _latency(one) for one in responses),
    }


def predict(drafted: Arm, plain: Arm, batch: int) -> float | None:
    """tau over the cost of a full drafted round in full plain ones; None where no round was full.

    A full round of either commits for every request: tau tokens, or one.
    """
    ours, theirs = _full_round(drafted.rounds, batch), _full_round(plain.rounds, batch)
    tau = ratio(drafted.committed, drafted.passes)
    if ours is None or theirs is None or tau is None:
        return None
    return ratio(tau * theirs, ours)


def _full_round(rounds: list[Round], batch: int) -> float | None:
    """Seconds of the median round that as many requests shared as ever did, each phase apart."""
    most = max((one.running for one in rounds), default=0)
    full = [one.phases for one in rounds if one.running == min(batch, most)]
    if not full:
        return None
    names = ("draft_s", "verify_s", "other_s")
    return sum(float(np.median([getattr(one, name) for one in full])) for name in names)


def _latency(response: Response) -> float:
    return response.queue_s + response.token_times[-1]


def where_it_pays(speed: list[dict[str, Any]]) -> str | None:
    """At which of the measured batch sizes drafting pays, as a sentence; None where fewer than two
    were measured.
    """
    rows = sorted((row for row in speed if row["pays"] is not None), key=lambda row: row["batch"])
    paid = [row["batch"] for row in rows if row["pays"]]
    lost = [row["batch"] for row in rows if not row["pays"]]
    if len(rows) < 2:
        return None
    if not paid:
        return f"drafting pays at no batch that was measured, down to {lost[0]}"
    if not lost:
        return f"drafting pays at every batch that was measured, up to {paid[-1]}"
    if paid[-1] < lost[0]:
        return f"drafting pays up to batch {paid[-1]}, not at batch {lost[0]}"
    at, not_at = (", ".join(map(str, sizes)) for sizes in (paid, lost))
    return (
        f"drafting pays at batch {at}, not at batch {not_at}: load cannot be the reason for that "
        "order; measure again on a machine without other work"
    )
