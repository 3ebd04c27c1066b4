"""Sample-size advice, degenerate answers, and the first tenth of a long run against the last."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from headsmith.inference.advice import advice_line, advise, advise_all, more_to_tell_apart
from headsmith.inference.deciles import compare_deciles, decile_warnings
from headsmith.inference.degenerate import KINDS, degenerate_warning, find_degenerate, kind_of
from headsmith.inference.metrics import bootstrap_tau
from headsmith.inference.records import Pass, Request, Response, Steps

Drawn = Callable[..., list[Steps]]


def width(interval: list[float] | None) -> float:
    assert interval is not None
    return interval[1] - interval[0]


def test_as_many_more_prompts_as_advised_halve_the_interval(drawn: Drawn) -> None:
    now = drawn(1, 40)
    advice = advise(now)
    assert advice is not None and advice["conversations"] == 40
    assert advice["half_width"] == pytest.approx(width(bootstrap_tau(now)) / 2)
    # The width falls with the square root: four times as many in all.
    assert 90 <= advice["more_to_halve"] <= 150 and advice["more_to_halve"] % 10 == 0
    # More of the same kind, really measured.
    then = drawn(1, 40 + advice["more_to_halve"])
    assert width(bootstrap_tau(then)) == pytest.approx(width(bootstrap_tau(now)) / 2, rel=0.2)


def test_advice_is_given_task_by_task_and_in_a_sentence(drawn: Drawn) -> None:
    records = [*drawn(1, 30, task="chat"), *drawn(2, 60, task="code", spread=0.01)]
    advice = advise_all(records)
    assert advice["tasks"]["chat"] == advise(records[:30]) != advice["overall"]
    line = advice_line(advice)
    more = advice["overall"]["more_to_halve"]
    assert f"from 90 conversations: about {more} more prompts would halve this interval" in line
    assert "of each task alone: chat +-" in line and "code +-" in line


def test_no_advice_where_there_is_no_interval(drawn: Drawn, one_record: Any) -> None:
    assert advise(drawn(1, 9)) is None and advise(drawn(1, 10)) is not None
    assert advise([one_record(str(i), "chat", [2, 2]) for i in range(20)]) is None, "no width"
    assert advice_line(advise_all([])) == "" == advice_line(None)


def test_prompts_that_would_tell_two_heads_apart() -> None:
    assert more_to_tell_apart(40, 0.1, [0.02, 0.2]) is None, "they are told apart"
    # The interval reaches twice as far down as the difference is high.
    assert more_to_tell_apart(40, 0.1, [-0.1, 0.3]) == 120
    assert more_to_tell_apart(40, -0.1, [-0.3, 0.1]) == 120
    assert more_to_tell_apart(40, 0.0, [-0.1, 0.1]) is None
    assert more_to_tell_apart(40, 0.0001, [-0.1, 0.1]) is None, "no practical number"


VARIED = random.Random(1).choices(range(900), k=60)


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        ([], "empty"),
        ([7] * 24, "one_token"),
        ([7] * 23, None),
        ([*VARIED, *[7] * 24, *VARIED], "one_token"),
        ([5, 6] * 12, "loop"),
        ([5, 6] * 11, None),
        ([*VARIED, *VARIED[:20] * 2, *VARIED[:3]], None),
        ([*VARIED[:10], *VARIED[20:40] * 3], "loop"),
        ([*VARIED[:10], *VARIED[20:40] * 2, *VARIED[20:39]], None),
        (random.Random(2).choices([1, 2], k=60), "few_pairs"),
        (VARIED, None),
    ],
)
def test_each_kind_of_degenerate_answer_by_its_criterion(ids: list[int], kind: str | None) -> None:
    assert kind_of(ids) == kind


def test_an_answer_that_reads_as_nothing_is_empty() -> None:
    assert kind_of([4, 9], " \n") == "empty"


def test_degenerate_answers_are_named_and_tau_is_given_without_them() -> None:
    def response(id: str, ids: list[int], accepted: int) -> Response:
        passes = [Pass(4, accepted, accepted + 1, 4)] * 3
        return Response(Request(id, "chat", [1]), ids, "length", passes, 0.1, 0.1, [0.1])

    answers = [response("a", VARIED, 1), response("b", [5, 6] * 30, 4), response("c", VARIED, 1)]
    found = find_degenerate(answers, str)
    assert found["answers"] == 1 and found["kinds"] == dict.fromkeys(KINDS, 0) | {"loop": 1}
    assert (found["tau"], found["tau_of_the_others"]) == (5.0, 2.0)
    assert found["which"] == [{"id": "b", "task": "chat", "kind": "loop"}]
    line = degenerate_warning(found, 3)
    assert "1 of 3 outputs are degenerate (1 loop)" in line
    assert "tau is 5.00 over them and 2.00 over the others" in line
    assert degenerate_warning(find_degenerate(answers[:1], str), 1) == ""


def test_decay_over_a_long_run_is_found(one_record: Callable[..., Steps]) -> None:
    draw = random.Random(3)

    def run(decay: float) -> list[Steps]:
        return [
            one_record(str(i), "chat", [int(draw.random() < 0.8 - decay * i / 300) * 3] * 5)
            for i in range(300)
        ]

    (row,) = compare_deciles(run(0.7)) or []
    assert row["requests"] == 30 and row["difference_ci"][1] < 0
    assert row["difference"] == pytest.approx(row["last_tau"] - row["first_tau"])
    (line,) = decile_warnings([row])
    assert "tau fell from" in line and "chat" in line
    steady = compare_deciles(run(0.0))
    assert steady is not None and decile_warnings(steady) == []


def test_a_change_of_task_or_turn_is_no_decay(one_record: Callable[..., Steps]) -> None:
    easy = [one_record(f"{i}#1", "easy", [4, i % 4]) for i in range(100)]
    hard = [one_record(f"{i}#1", "hard", [0, i % 2]) for i in range(120)]
    later = [one_record(f"{i}#2", "easy", [0, i % 2]) for i in range(100)]
    rows = compare_deciles([*easy, *hard, *later])
    assert rows is not None
    assert [(row["task"], row["turn"]) for row in rows] == [("easy", 1), ("hard", 1), ("easy", 2)]
    assert decile_warnings(rows) == []
    assert compare_deciles(easy[:99]) is None and decile_warnings(None) == []
