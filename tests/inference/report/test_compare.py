"""Paired comparison: found where it is, not where it is not, and refused between unlike runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headsmith.cli import cli, run
from headsmith.errors import HeadsmithError
from headsmith.inference.compare import compare
from headsmith.inference.metrics import bootstrap_tau
from headsmith.inference.records import Steps

Drawn = Callable[..., list[Steps]]
Save = Callable[..., Path]


def test_a_small_difference_is_found_although_the_intervals_overlap(
    drawn: Drawn, save_run: Save
) -> None:
    a, b = drawn(1, 80, spread=0.2), drawn(1, 80, spread=0.2, more=0.03)
    ours, theirs = bootstrap_tau(a), bootstrap_tau(b)
    assert ours is not None and theirs is not None and ours[1] > theirs[0], "or it were easy"
    (one,) = compare([save_run("a", a), save_run("b", b)])["comparisons"]
    row = one["overall"]
    assert row["verdict"] == "longer" and row["difference_ci"][0] > 0
    assert row["difference"] == pytest.approx(row["tau"] - row["reference_tau"])
    assert row["longer_share"] > 0.97 and row["more_to_tell_apart"] is None
    width = row["difference_ci"][1] - row["difference_ci"][0]
    assert width < 0.7 * (ours[1] - ours[0]), "pairing leaves out what makes prompts easy"
    (back,) = compare([save_run("c", b), save_run("d", a)])["comparisons"]
    assert back["overall"]["verdict"] == "shorter"
    assert back["overall"]["difference"] == pytest.approx(-row["difference"])


def test_equal_runs_are_undecided_and_say_how_many_more_would_tell(
    drawn: Drawn, save_run: Save
) -> None:
    a = drawn(1, 40)
    (same,) = compare([save_run("a", a), save_run("b", a)])["comparisons"]
    assert same["overall"]["difference"] == 0
    assert same["overall"]["verdict"] == "undecided"
    assert same["overall"]["more_to_tell_apart"] is None
    # The same chances, drawn again: only luck is between them.
    c = [replace(one, id=a[i].id) for i, one in enumerate(drawn(2, 40))]
    (luck,) = compare([save_run("c", a), save_run("d", c)])["comparisons"]
    assert luck["overall"]["verdict"] == "undecided"
    assert luck["overall"]["more_to_tell_apart"] >= 1


def test_few_conversations_decide_nothing(drawn: Drawn, save_run: Save) -> None:
    runs = [save_run("a", drawn(1, 9)), save_run("b", drawn(1, 9, more=0.3))]
    (one,) = compare(runs)["comparisons"]
    assert one["overall"]["difference_ci"][0] > 0 and one["overall"]["verdict"] == "too few"


def test_tasks_are_told_apart_and_their_disagreement_is_said(drawn: Drawn, save_run: Save) -> None:
    a = [*drawn(1, 50, task="chat"), *drawn(2, 50, task="code")]
    b = [*drawn(1, 50, task="chat", more=0.15), *drawn(2, 50, task="code", more=-0.15)]
    (one,) = compare([save_run("a", a), save_run("b", b, draft="chain:6")])["comparisons"]
    assert one["tasks"]["chat"]["verdict"] == "longer"
    assert one["tasks"]["code"]["verdict"] == "shorter"
    notes = " ".join(one["notes"])
    assert "the tasks disagree" in notes and "drafts differ (chain:4 and chain:6)" in notes


def test_turns_of_a_conversation_are_drawn_together(drawn: Drawn, save_run: Save) -> None:
    a, b = drawn(1, 20, turns=2), drawn(1, 20, turns=2, more=0.1)
    later = [one for one in b if not one.id.endswith("7#2")]
    (one,) = compare([save_run("a", a), save_run("b", later)])["comparisons"]
    assert one["overall"]["conversations"] == 20
    assert one["overall"]["requests"] == 38
    assert any("2 later turns were answered in one" in note for note in one["notes"])


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({"max_new_tokens": 128}, "max_new_tokens is 64 and 128"),
        ({"rule": "sample", "temperature": 1.0}, "rule is greedy and sample; temperature is 0.0"),
        ({"system_prompt": "Be kind."}, "system_prompt is None and Be kind."),
        ({"prompts_sha256": "other"}, "the texts of the prompts differ"),
        ({"something_new": 3}, "something_new is None and 3"),
    ],
)
def test_other_settings_are_refused_by_name(
    setup: dict[str, Any], words: str, drawn: Drawn, save_run: Save
) -> None:
    records = drawn(1, 4)
    with pytest.raises(HeadsmithError, match="cannot be compared: .*; measure both alike") as said:
        compare([save_run("a", records), save_run("b", records, **setup)])
    assert words in str(said.value)


def test_what_is_compared_may_differ(drawn: Drawn, save_run: Save) -> None:
    records = drawn(1, 4)
    other = {"drafter": "none", "draft": None, "seed": 7, "batches": (8,), "prompts": "there"}
    compare([save_run("a", records), save_run("b", records, **other)])
    # A seed that draws the text is a setting like any other.
    warm = {"rule": "sample", "temperature": 0.7}
    a, b = save_run("c", records, **warm), save_run("d", records, **warm, seed=7)
    with pytest.raises(HeadsmithError, match="seed is 0 and 7"):
        compare([a, b])


def test_another_target_or_other_prompts_are_refused(
    drawn: Drawn, save_run: Save, one_record: Callable[..., Steps]
) -> None:
    records = drawn(1, 4)
    a, b = save_run("a", records), save_run("b", records)
    result = json.loads((b / "result.json").read_text())
    result["target"] |= {"fingerprint": "sha256:u", "dtype": "bfloat16"}
    (b / "result.json").write_text(json.dumps(result))
    with pytest.raises(HeadsmithError, match="target.fingerprint is .* target.dtype is float32"):
        compare([a, b])
    fewer = save_run("fewer", records[:3])
    with pytest.raises(HeadsmithError, match=r"fewer lacks 1 of the requests \(first: chat:3\)"):
        compare([a, fewer])
    longer = save_run("longer", [*records[:3], one_record("3", "chat", [1], prompt=10)])
    with pytest.raises(HeadsmithError, match="the prompt of chat:3 is of another length"):
        compare([a, longer])


def test_the_command_prints_a_table_and_writes_json(
    drawn: Drawn, save_run: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save_run("a", drawn(1, 40)), save_run("b", drawn(1, 40, more=0.2))
    args = ["compare", str(a), str(b / "result.json"), f"--json={tmp_path / 'found.json'}"]
    assert run(cli, args) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "chat 40" in said and "longer" in said and "drawn for both at once" in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["schema"] == "headsmith.compare/1" and found == {
        **compare([a, b / "result.json"]),
        "created": found["created"],
    }
    assert run(cli, ["compare", str(a), str(b), "--json=-"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in alone["runs"]] == [str(a), str(b)]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda a: [a], "one run is nothing to compare"),
        (lambda a: [a, a.parent / "nothing"], "name a folder that headsmith eval --out wrote"),
        (lambda a: [a, a / "steps.jsonl"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(
    make: Callable[[Path], list[Path]],
    sentence: str,
    drawn: Drawn,
    save_run: Save,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = [str(path) for path in make(save_run("a", drawn(1, 2)))]
    assert run(cli, ["compare", *args]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("headsmith: error: ") and sentence in said
