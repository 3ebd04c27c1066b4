"""The table for people: the result's numbers, in 80 columns, and a checklist before a verdict."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from headsmith.inference.metrics import by_task, equivalents, summarise
from headsmith.inference.records import Pass, Steps
from headsmith.inference.report import TAU_FORMULA, print_report


def result(accepted: list[int], *, drafter: str = "head", **speed: Any) -> dict[str, Any]:
    """A result whose every request has these accepted counts at depth 4, or plain decoding."""
    depth = 4 if drafter == "head" else 0
    passes = [Pass(depth, a, a + 1, depth) for a in accepted]
    tokens = 1 + sum(one.committed for one in passes)
    steps = [Steps(str(i), f"task{i % 2}", 9, tokens, "length", passes) for i in range(4)]
    row = {
        "batch": 1,
        "baseline_tokens_per_s": 20.0,
        "tokens_per_s": 30.0,
        "speedup": 1.5,
        "ttft_ms": {"p50": 100.0, "p95": 120.0},
        "itl_ms": {"p50": 33.0, "p95": 40.0},
        "draft_ms": 10.0,
        "verify_ms": 60.0,
        "other_ms": 0.5,
        "cost_per_token_ms": 33.33,
        "baseline_cost_per_token_ms": 50.0,
        "pays": True,
        "peak_memory_bytes": 1_500_000_000,
        "head_bytes": 10_000_000,
        "predicted_speedup": 1.6,
    }
    head = {"path": "out/best", "kind": "eagle3"} if drafter == "head" else None
    return {
        "target": {"path": "smollm2-135m-instruct", "dtype": "float32"},
        "device": {"name": "A CPU of eight cores"},
        "head": head,
        "setup": {"drafter": drafter, "draft": "chain:4", "rule": "greedy", "lossless": True},
        "tasks": by_task(steps),
        "overall": summarise(steps),
        "speed": [row | speed],
        "equality": {
            "checked": 40,
            "exact": 38,
            "ties": 2,
            "fails": 0,
            "compared_to_baseline": 4,
            "identical_to_baseline": 3,
        },
        "lossy": None,
        "equivalents": equivalents(steps),
        "warnings": ["something to know"],
    }


def printed(given: dict[str, Any], width: int = 80) -> str:
    stream = io.StringIO()
    print_report(given, Console(file=stream, width=width))
    return stream.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_numbers_of_the_result_are_there_in_80_columns() -> None:
    text = printed(result([4, 2, 0, 2]))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text, "no cell may be cut"
    words = flat(text)
    assert TAU_FORMULA in words
    assert "out/best (eagle3, chain:4) on smollm2-135m-instruct, float32" in words
    assert "all 4 52 3.00 3.00 .. 3.00 3.00 50.0 % 25.0 %" in words
    assert "of depth 4" in words
    assert "u: of all passes 75.0 % 75.0 % 25.0 % 25.0 %" in words
    assert "c: of those that came so far 75.0 % 100.0 % 33.3 % 100.0 %" in words
    assert "1 20.0 30.0 1.50 1.60 yes 10.00 60.00 0.50 1.50" in words
    assert "the head pays: (draft + verify + rest) per committed token 33.33 ms < 50.00 ms" in words
    assert "38 exact, 2 ties, 0 fails" in words and "3 of 4 outputs" in words
    assert "vLLM 3.00, SGLang 3.25, EAGLE 3.00, Spec-Bench 3.00" in words
    assert "warning: something to know" in words
    assert "wiring" not in words


def test_a_head_that_does_not_pay_is_told_so() -> None:
    text = flat(printed(result([1, 1], pays=False, cost_per_token_ms=60.0)))
    assert "the head does not pay" in text and "60.00 ms >= 50.00 ms" in text


def test_missing_figures_are_dashes() -> None:
    text = flat(printed(result([1], baseline_tokens_per_s=None, speedup=None, pays=None)))
    assert "1 - 30.0 - 1.60 -" in text
    assert "pays:" not in text


@pytest.mark.parametrize("accepted", [[0] * 50, [0] * 99 + [1]], ids=["none", "one in a hundred"])
def test_almost_no_acceptance_gives_the_checklist(accepted: list[int]) -> None:
    text = flat(printed(result(accepted)))
    for word in ("taps:", "d2t:", "norms:", "rope:", "template:", "pairing:"):
        assert word in text
    assert "fault of the wiring" in text


def test_plain_decoding_has_no_rates_and_no_checklist() -> None:
    text = flat(printed(result([0] * 5, drafter="none")))
    assert "plain decoding on smollm2-135m-instruct" in text
    for word in ("accepted", "wiring", "vLLM"):
        assert word not in text


def test_a_deep_draft_still_shows_every_position() -> None:
    given = result([4])
    given["overall"]["per_position"] = [0.5] * 12
    given["overall"]["conditional"] = [1.0] * 12
    text = printed(given, width=200)
    assert " 12" in text and "…" not in text
