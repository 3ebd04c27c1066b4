"""The `load` of a result: arithmetic from known times, and a whole evaluation with a queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headsmith.errors import HeadsmithError
from headsmith.inference.arrival import Arrival
from headsmith.inference.evaluate import EvalSettings, evaluate
from headsmith.inference.load import flow, load_row, predict, where_it_pays
from headsmith.inference.plots import can_plot
from headsmith.inference.records import Pass, Phases, Request, Response, Round
from headsmith.inference.report import print_report
from headsmith.inference.speed import Arm


def response(queue: float, times: list[float], passes: list[Pass]) -> Response:
    ids = list(range(len(times)))
    decode = times[-1] - times[0]
    return Response(Request("r", "t", [1]), ids, "length", passes, times[0], decode, times, queue)


def arm(rounds: list[Round], *responses: Response, seconds: float = 2.0) -> Arm:
    from headsmith.inference.speed import Chunk

    made = [one for r in responses for one in r.passes]
    chunk = Chunk(Phases(), sum(one.committed for one in made), len(made))
    return Arm(None, list(responses), [chunk], rounds, seconds)  # type: ignore[arg-type]


def round_of(running: int, draft: float, verify: float, other: float = 0.0) -> Round:
    return Round(running, Phases(0.0, draft, verify, other))


def test_times_of_a_request_apart_and_together() -> None:
    one = response(0.5, [0.25, 1.25, 1.25], [Pass(2, 1, 2, 2)])
    got = flow(arm([round_of(1, 0, 1)], one))
    assert got["queue_ms"]["p50"] == 500 and got["prefill_ms"]["p99"] == 250
    assert got["decode_ms"]["p95"] == 1000 and got["ttft_ms"]["p50"] == 750
    assert got["latency_ms"]["p50"] == 1750
    assert got["itl_ms"] == {"p50": 500, "p95": 500, "p99": 500}
    assert got["requests_per_s"] == 0.5 and got["output_tokens_per_s"] == 1.5
    assert got["running"] == 1


def test_the_prediction_is_of_full_rounds() -> None:
    """tau 2 in 40 + 10 ms against 30 ms a plain one: 1.2. Rounds at the edges say nothing."""
    mine = response(0, [0.1, 0.2, 0.2], [Pass(1, 1, 2, 1)])
    theirs = response(0, [0.1, 0.2, 0.3], [Pass(0, 0, 1, 0)] * 2)
    full, empty = [round_of(4, 0.01, 0.04)] * 3, [round_of(1, 0.9, 0.9)] * 5
    plain = arm([round_of(4, 0, 0.03), round_of(2, 0, 7.0)], theirs, seconds=3.0)
    drafted = arm([*full, *empty], mine)
    assert predict(drafted, plain, 4) == pytest.approx(2 * 0.03 / 0.05)
    row = load_row(drafted, plain, batch=4, arrival=Arrival("constant", 2.0), memory={"cache": 7})
    assert row["arrival"] == "constant:2" and row["memory"] == {"cache": 7}
    assert row["speedup"] == pytest.approx(1.5) and row["identical"] == 1
    alone = load_row(drafted, None, batch=4, arrival=Arrival(), memory={})
    assert (alone["plain"], alone["speedup"], alone["predicted_speedup"]) == (None, None, None)


def test_where_it_stops_to_pay() -> None:
    def rows(**pays: bool | None) -> list[dict[str, Any]]:
        return [{"batch": int(name[1:]), "pays": given} for name, given in pays.items()]

    for order in (rows(b1=True, b4=True, b16=False), rows(b16=False, b4=True, b1=True)):
        assert where_it_pays(order) == "drafting pays up to batch 4, not at batch 16"
    every = where_it_pays(rows(b1=True, b4=True))
    assert every == "drafting pays at every batch that was measured, up to 4"
    none = where_it_pays(rows(b4=False, b16=False))
    assert none == "drafting pays at no batch that was measured, down to 4"
    assert where_it_pays(rows(b1=None)) is None
    assert where_it_pays(rows(b1=True, b4=None)) is None, "one size is no sweep"


@pytest.mark.parametrize("lost", [{"b1"}, {"b1", "b16"}, {"b4"}])
def test_an_order_that_load_cannot_explain(lost: set[str]) -> None:
    speed = [{"batch": int(b[1:]), "pays": b not in lost} for b in ("b1", "b4", "b16")]
    told = where_it_pays(speed)
    assert told is not None and "measure again on a machine without other work" in told
    paid = ", ".join(b[1:] for b in ("b1", "b4", "b16") if b not in lost)
    assert told.startswith(f"drafting pays at batch {paid}, not at batch ")


@pytest.fixture(scope="module")
def loaded(
    folders: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    target, head, prompts = map(str, folders)
    out = tmp_path_factory.mktemp("loaded")
    settings = EvalSettings(
        target=target,
        head=head,
        prompts=prompts,
        max_new_tokens=6,
        device="cpu",
        batch=(1, 2, 4),
        draft="chain:2",
        arrival="poisson:200",
        prefill_chunk=8,
        out=str(out),
    )
    return evaluate(settings), out


def test_a_queue_is_measured_whole(loaded: tuple[dict[str, Any], Path]) -> None:
    result, out = loaded
    assert result["setup"]["arrival"] == "poisson:200" and result["setup"]["prefill_chunk"] == 8
    assert result["equality"]["fails"] == 0
    for row in result["speed"]:
        load = row["load"]
        assert load["identical"] == result["overall"]["requests"]
        for who in ("drafted", "plain"):
            assert 1 <= load[who]["running"] <= row["batch"]
            assert load[who]["ttft_ms"]["p99"] >= load[who]["prefill_ms"]["p50"]
        memory = load["memory"]
        assert memory["target"] > memory["head"] > 0 and memory["workspace"] >= 0
        assert memory["cache"] > 0 and memory["head_cache"] > 0
    first, *_, last = result["speed"]
    assert last["load"]["memory"]["cache"] == 4 * first["load"]["memory"]["cache"]
    assert json.loads((out / "result.json").read_text())["speed"] == result["speed"]


def test_the_report_shows_it(loaded: tuple[dict[str, Any], Path]) -> None:
    result, out = loaded
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(result, console)
    text = console.export_text()
    assert "requests arrive poisson:200" in text and "load at 4 concurrent" in text
    assert "drafting pays" in text
    summary = (out / "summary.md").read_text()
    assert "## Load" in summary and "## Memory at the peak in MB" in summary
    assert "load_drafted_ttft_ms_p99" in (out / "speed.csv").read_text().splitlines()[0]
    assert (out / "load.png").exists() == can_plot()


def test_without_a_pattern_there_is_no_queue(folders: tuple[Path, Path, Path]) -> None:
    target, head, prompts = map(str, folders)
    settings = EvalSettings(
        target=target, head=head, prompts=prompts, max_new_tokens=2, device="cpu", baseline=False
    )
    result = evaluate(settings)
    assert "load" not in result["speed"][0] and result["setup"]["arrival"] is None


def test_an_interrupted_queue_keeps_nothing(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    target, head, prompts = map(str, folders)

    def stop(done: int, total: int, label: str) -> None:
        raise KeyboardInterrupt

    settings = EvalSettings(
        target=target, head=head, prompts=prompts, max_new_tokens=2, arrival="all",
        out=str(tmp_path), device="cpu",
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        evaluate(settings, stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given, message",
    [
        ({"arrival": "poisson"}, "arrival 'poisson' is no pattern"),
        ({"prefill_chunk": 0}, "prefill-chunk is 0; it must be 1 or more"),
    ],
)
def test_what_cannot_be_asked_for(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match=message):
        EvalSettings(head=str(tmp_path), **given)
