"""Speed: the drafted decoder and the plain one, measured in turn over the same requests.

Chunks of requests alternate (plain, drafted, drafted, plain, ...), so that a machine that slows
down slows both. Times come from the decoder's own phases; prefill is kept apart. A row of `speed`
in `result.json` says, for one batch size:

    tokens_per_s          committed tokens / decode time; the prefill's token is in neither
    speedup               tokens_per_s / baseline_tokens_per_s
    draft, verify, other  ms of each phase per pass of a request (a batch shares its time)
    cost_per_token_ms     (draft + verify + other) / committed tokens
    pays                  cost_per_token_ms < baseline_cost_per_token_ms
    predicted_speedup     tau / (c_v + c_d + c_o): phase medians over chunks in units of the plain
                          decoder's time per token (spec/verifier.md 4.4)
    itl_ms                time between commits, shared by the tokens of a commit
    load                  where an arrival pattern was given: see `headsmith.inference.load`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from headsmith.inference.records import Phases, Request, Response, Round

CHUNK_BATCHES = 4


class Generates(Protocol):
    """What is measured: `headsmith.inference.engine.Decoder`, or a stand-in in tests."""

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None] | None = None,
    ) -> tuple[list[Response], Phases]: ...


@dataclass(slots=True)
class Chunk:
    """Times and counts of one decoder over one chunk of requests."""

    phases: Phases
    committed: int
    passes: int


@dataclass(slots=True)
class Arm:
    """One of the two decoders and what it has done so far."""

    decoder: Generates
    responses: list[Response] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0

    def run(
        self, requests: Sequence[Request], on_response: Callable[[Response], None] | None
    ) -> None:
        """Decodes a chunk and keeps its responses and times."""
        begin = time.perf_counter()
        responses, phases = self.decoder.generate(requests, on_response)
        self.seconds += time.perf_counter() - begin
        self.rounds += getattr(self.decoder, "rounds", ())
        passes = [one for response in responses for one in response.passes]
        committed = sum(one.committed for one in passes)
        self.responses += responses
        self.chunks.append(Chunk(phases, committed, len(passes)))

    @property
    def phases(self) -> Phases:
        """Sum over the chunks."""
        return sum((chunk.phases for chunk in self.chunks), Phases())

    @property
    def committed(self) -> int:
        """Tokens that passes committed (the prefill's are not)."""
        return sum(chunk.committed for chunk in self.chunks)

    @property
    def passes(self) -> int:
        """Verification passes, summed over requests."""
        return sum(chunk.passes for chunk in self.chunks)

    def median_ms(self, phase: str, per: str) -> float | None:
        """Median over chunks of a phase's milliseconds per committed token or per pass."""
        costs = [
            1000 * getattr(chunk.phases, phase) / getattr(chunk, per)
            for chunk in self.chunks
            if getattr(chunk, per)
        ]
        return float(np.median(costs)) if costs else None


def alternate(
    arms: Sequence[Arm],
    requests: Sequence[Request],
    batch: int,
    on_response: Callable[[Response], None] | None = None,
    *,
    whole: bool = False,
) -> None:
    """Runs every arm over all requests, in chunks, the arms' order turning from chunk to chunk.

    `whole`: as one chunk, for a queue is what it is only when nobody interrupts it.
    """
    size = max(batch, min(CHUNK_BATCHES * batch, -(-len(requests) // 2)))
    size = len(requests) if whole else size
    for number, start in enumerate(range(0, len(requests), size)):
        for arm in arms if number % 2 == 0 else reversed(arms):
            arm.run(requests[start : start + size], on_response)


def speed_row(
    drafted: Arm,
    baseline: Arm | None,
    *,
    batch: int,
    peak_memory_bytes: int | None,
    head_bytes: int | None,
) -> dict[str, Any]:
    """The row of `speed` for one batch size; baseline figures are None without a baseline."""
    cost = ratio(1000 * drafted.phases.decode_s, drafted.committed)
    base = ratio(1000 * baseline.phases.decode_s, baseline.committed) if baseline else None
    compared = cost is not None and base is not None
    return {
        "batch": batch,
        "baseline_tokens_per_s": ratio(1000, base),
        "tokens_per_s": ratio(1000, cost),
        "speedup": ratio(base, cost),
        "ttft_ms": percentiles(r.token_times[0] * 1000 for r in drafted.responses),
        "itl_ms": percentiles(gaps_ms(drafted.responses)),
        "draft_ms": ratio(1000 * drafted.phases.draft_s, drafted.passes),
        "verify_ms": ratio(1000 * drafted.phases.verify_s, drafted.passes),
        "other_ms": ratio(1000 * drafted.phases.other_s, drafted.passes),
        "cost_per_token_ms": cost,
        "baseline_cost_per_token_ms": base,
        "pays": bool(cost < base) if compared else None,  # type: ignore[operator]
        "peak_memory_bytes": peak_memory_bytes,
        "head_bytes": head_bytes,
        "predicted_speedup": predicted_speedup(drafted, baseline) if baseline else None,
    }


def predicted_speedup(drafted: Arm, baseline: Arm) -> float | None:
    """tau / (c_v + c_d + c_o), each the median phase time of a pass over the plain token's."""
    token = baseline.median_ms("decode_s", "committed")
    phases = [drafted.median_ms(name, "passes") for name in ("verify_s", "draft_s", "other_s")]
    tau = ratio(drafted.committed, drafted.passes)
    if token is None or tau is None:
        return None
    return ratio(tau * token, sum(phase for phase in phases if phase is not None))


def gaps_ms(responses: Iterable[Response]) -> Iterable[float]:
    """Milliseconds between commits, shared by the tokens of a commit; prefill apart."""
    for response in responses:
        at, before = 0, response.token_times[0]
        for one in response.passes:
            if one.committed:
                at += one.committed
                now = response.token_times[at]
                yield from [1000 * (now - before) / one.committed] * one.committed
                before = now


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """`p50`, `p95` and `p99`; None each where there is no value."""
    known = list(values)
    if not known:
        return dict.fromkeys(("p50", "p95", "p99"))
    p50, p95, p99 = np.percentile(known, [50, 95, 99])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}


def ratio(part: float | None, whole: float | None) -> float | None:
    """None where one of them is None or the whole is nothing."""
    return float(part / whole) if part is not None and whole else None
