"""`--gate`: bounds that are met and missed, and files that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headsmith.errors import GateNotMet, HeadsmithError
from headsmith.inference.gate import KNOWN, check_names, judge, load_gate, raise_if_missed
from headsmith.inference.records import Steps

Write = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def result(drawn: Callable[..., list[Steps]], result_of: Callable[..., Any]) -> dict[str, Any]:
    """Two tasks at batch 1 and 4, where the speedup is 2.0 and 0.5."""
    given: dict[str, Any] = result_of(
        [*drawn(1, 20, task="chat"), *drawn(2, 20, task="code", alpha=0.3)]
    )
    return given


def judged(write: Write, text: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    bounds = load_gate(write("gate.yaml", text))
    check_names(bounds, result["tasks"], [1, 4])
    return judge(bounds, result)


def test_every_bound_is_met_or_missed_with_a_sentence(write: Write, result: dict[str, Any]) -> None:
    tau = result["tasks"]["code"]["tau"]
    text = f"""
- {{metric: tau, task: code, min: {tau + 0.1:.3f}}}
- {{metric: tau, task: code, max: {tau + 0.1:.3f}}}
- {{metric: tau_low, min: 1}}
- {{metric: u_1, min: 0.1, max: 0.9}}
- {{metric: u_5, min: 0.1}}
- {{metric: speedup, min: 1.2}}
- {{metric: speedup, batch: 1, min: 1.2}}
- {{metric: equality_fails, max: 0}}
- {{metric: degenerate_answers, max: 0}}
- {{metric: itl_ms_p95, max: 50}}
"""
    rows = judged(write, text, result)
    assert [(row["metric"], row["met"]) for row in rows] == [
        ("tau", False),
        ("tau", True),
        ("tau_low", True),
        ("u_1", True),
        ("u_5", False),
        ("speedup", True),
        ("speedup", False),
        ("speedup", True),
        ("equality_fails", True),
        ("degenerate_answers", True),
        ("itl_ms_p95", True),
        ("itl_ms_p95", True),
    ]
    assert rows[0]["says"] == (
        f"tau of code is {tau:.4g}, the gate asks for at least {tau + 0.1:.4g}"
    )
    assert rows[3]["value"] == result["overall"]["per_position"][0]
    assert rows[4]["says"] == "u_5 of all prompts was not measured, the gate asks for at least 0.1"
    assert rows[6]["says"] == "speedup at batch 4 is 0.5, the gate asks for at least 1.2"
    with pytest.raises(GateNotMet) as missed:
        raise_if_missed({"gate": rows})
    assert [part["says"] in str(missed.value) for part in rows] == [not row["met"] for row in rows]
    raise_if_missed({"gate": rows[1:3]})
    raise_if_missed({})


def test_every_known_metric_has_a_figure(write: Write, result: dict[str, Any]) -> None:
    names = [name.replace("_N", "_2") for name in KNOWN]
    text = "".join(f"- {{metric: {name}, min: 0}}\n" for name in names)
    rows = judged(write, text, result)
    assert {row["metric"] for row in rows} == set(names)
    assert all(row["value"] is not None for row in rows)


def test_without_a_baseline_a_speedup_is_missed(write: Write, result: dict[str, Any]) -> None:
    bare = result | {"speed": [result["speed"][0] | {"speedup": None}]}
    (row,) = judged(write, "- {metric: speedup, min: 1}", bare)
    assert not row["met"] and "was not measured" in row["says"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- {metric: taw, min: 1}", "entry 1: metric 'taw' is unknown; known are tau, "),
        ("- {metric: tau, min: 1}\n- {metric: tau}", "entry 2: the bound of tau is missing"),
        ("- {metric: tau, min: 2, max: 1}", "min 2 of tau is above its max 1"),
        ("- {metric: tau, min: much}", "entry 1: min: Input should be a valid number"),
        ("- {metric: tau, min: .nan}", "entry 1: min: "),
        ("- {metric: tau, mins: 1}", "entry 1: mins: Extra inputs are not permitted"),
        ("- {min: 1}", "entry 1: metric: Field required"),
        ("- 7", "entry 1: Input should be"),
        ("- {metric: speedup, task: chat, min: 1}", "speedup is of the whole run and has no task"),
        ("- {metric: tau, batch: 4, min: 1}", "tau does not depend on the batch size"),
        ("metric: tau", "is not a list of bounds"),
        ("", "is not a list of bounds"),
        ("- {metric: tau", "cannot be read"),
        ("- {metric: tau, task: maths, min: 1}", "task 'maths', .* tasks are chat, code, overall"),
        ("- {metric: speedup, batch: 8, min: 1}", "at batch 8, which is not measured"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(
    text: str, sentence: str, write: Write, result: dict[str, Any]
) -> None:
    with pytest.raises(HeadsmithError, match=sentence) as said:
        judged(write, text, result)
    assert said.value.exit_code == 2 and "\n" not in str(said.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="the gate .* cannot be read"):
        load_gate(tmp_path / "none.yaml")
