"""Speed rows: arithmetic from known times, and the two decoders taking turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headsmith.inference.records import Pass, Phases, Request, Response
from headsmith.inference.speed import Arm, alternate, predicted_speedup, speed_row


class FakeDecoder:
    """Every request takes `passes`; phases are given per pass, in seconds."""

    def __init__(self, name: str, passes: list[Pass], phases: Phases, log: list[str]) -> None:
        self.name, self.passes, self.per_pass, self.log = name, passes, phases, log

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None] | None = None,
    ) -> tuple[list[Response], Phases]:
        self.log += [f"{self.name}:{request.id}" for request in requests]
        times, now = [0.5], 0.5
        for one in self.passes:
            now += self.per_pass.decode_s
            times += [now] * one.committed
        responses = []
        for request in requests:
            ids = list(range(len(times)))
            response = Response(request, ids, "length", self.passes, 0.5, now - 0.5, times)
            responses.append(response)
            if on_response:
                on_response(response)
        count = len(requests) * len(self.passes)
        one = self.per_pass
        return responses, Phases(
            0.5 * len(requests), one.draft_s * count, one.verify_s * count, one.other_s * count
        )


def arms(log: list[str], draft_s: float = 0.002) -> tuple[Arm, Arm]:
    """Plain: 10 ms a token. Drafted: tau 2, a verification of 12 ms, 1 ms of coordination."""
    plain = FakeDecoder("plain", [Pass(0, 0, 1, 0)] * 4, Phases(0, 0.0, 0.010, 0.0), log)
    drafted = FakeDecoder("drafted", [Pass(3, 1, 2, 3)] * 2, Phases(0, draft_s, 0.012, 0.001), log)
    return Arm(plain), Arm(drafted)


def requests(count: int) -> list[Request]:
    return [Request(str(number), "chat", [1, 2]) for number in range(count)]


def test_chunks_alternate_and_every_request_runs_once_in_each() -> None:
    log: list[str] = []
    plain, drafted = arms(log)
    seen: list[str] = []
    alternate([plain, drafted], requests(9), 1, lambda response: seen.append(response.request.id))
    order = [entry.split(":")[0] for entry in log]
    runs = [order[0]] + [b for a, b in zip(order, order[1:], strict=False) if a != b]
    assert runs == ["plain", "drafted", "plain", "drafted"]
    # The third chunk starts with plain again and the second with drafted: neither is always first.
    assert log[4:8] == [f"drafted:{i}" for i in range(4)]
    assert log[8:12] == [f"drafted:{i}" for i in range(4, 8)]
    for arm in (plain, drafted):
        assert [one.request.id for one in arm.responses] == [str(i) for i in range(9)]
    assert len(seen) == 18


@pytest.mark.parametrize("count", [1, 2, 7, 8, 33])
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_chunks_fill_the_batch_and_lose_nobody(count: int, batch: int) -> None:
    plain, drafted = arms([])
    alternate([plain, drafted], requests(count), batch)
    assert len(plain.responses) == len(drafted.responses) == count
    assert plain.committed == 4 * count and drafted.passes == 2 * count


def test_row_is_the_arithmetic_of_the_phases() -> None:
    plain, drafted = arms([])
    alternate([plain, drafted], requests(8), 1)
    row = speed_row(drafted, plain, batch=1, peak_memory_bytes=7, head_bytes=9)
    assert row["baseline_cost_per_token_ms"] == pytest.approx(10.0)
    assert row["cost_per_token_ms"] == pytest.approx(15.0 / 2)
    assert row["baseline_tokens_per_s"] == pytest.approx(100.0)
    assert row["tokens_per_s"] == pytest.approx(2000 / 15)
    assert row["speedup"] == pytest.approx(20 / 15)
    assert row["predicted_speedup"] == pytest.approx(20 / 15)
    assert row["pays"] is True
    assert (row["draft_ms"], row["verify_ms"], row["other_ms"]) == (
        pytest.approx(2.0),
        pytest.approx(12.0),
        pytest.approx(1.0),
    )
    assert row["ttft_ms"] == {"p50": 500.0, "p95": 500.0, "p99": 500.0}
    assert row["itl_ms"]["p50"] == pytest.approx(7.5)
    assert (row["peak_memory_bytes"], row["head_bytes"]) == (7, 9)


def test_a_slow_head_does_not_pay() -> None:
    plain, drafted = arms([], draft_s=0.008)
    alternate([plain, drafted], requests(4), 1)
    row = speed_row(drafted, plain, batch=1, peak_memory_bytes=None, head_bytes=None)
    assert row["pays"] is False and row["speedup"] < 1


def test_without_a_baseline_nothing_is_compared() -> None:
    _, drafted = arms([])
    alternate([drafted], requests(3), 1)
    row = speed_row(drafted, None, batch=1, peak_memory_bytes=None, head_bytes=None)
    assert row["tokens_per_s"] is not None
    for key in ("baseline_tokens_per_s", "speedup", "pays", "predicted_speedup"):
        assert row[key] is None


def test_answers_of_one_token_have_no_decode_time() -> None:
    drafted = Arm(FakeDecoder("drafted", [], Phases(), []))
    alternate([drafted], requests(2), 1)
    row = speed_row(drafted, drafted, batch=1, peak_memory_bytes=None, head_bytes=None)
    assert row["tokens_per_s"] is None and row["speedup"] is None and row["pays"] is None
    assert row["itl_ms"] == {"p50": None, "p95": None, "p99": None}
    assert row["ttft_ms"]["p50"] == 500.0
    assert predicted_speedup(drafted, drafted) is None


def test_one_slow_chunk_moves_the_measurement_but_not_the_prediction() -> None:
    plain, drafted = arms([])
    alternate([plain, drafted], requests(16), 1)
    drafted.chunks[1].phases.verify_s *= 10
    row = speed_row(drafted, plain, batch=1, peak_memory_bytes=None, head_bytes=None)
    assert row["predicted_speedup"] == pytest.approx(20 / 15)
    assert row["speedup"] < 0.6 * row["predicted_speedup"]
