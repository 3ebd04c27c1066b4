"""`headsmith tune`: the choice from known figures, and a whole run on a tiny random target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from headsmith.errors import HeadsmithError
from headsmith.inference.plots import can_plot
from headsmith.inference.settings import EvalSettings
from headsmith.inference.tune import summarise_runs, tune
from headsmith.inference.tune_cli import tune_
from headsmith.inference.tune_report import advice, print_tune


def result(draft: str, speedups: dict[int, float], tau: float = 2.0) -> dict[str, Any]:
    speed = [
        {"batch": batch, "speedup": one, "pays": one > 1, "cost_per_token_ms": 10 / one}
        for batch, one in speedups.items()
    ]
    return {
        "setup": {"draft": draft, "batch": list(speedups), "context": []},
        "overall": {"tau": tau, "tau_ci": [tau - 0.1, tau + 0.1], "nodes_per_token": 2.0},
        "tasks": {},
        "equality": {"fails": 0},
        "speed": speed,
        "versions": {},
        "device": {},
        "target": {},
        "head": None,
        "warnings": ["the same"],
    }


def found(*results: dict[str, Any]) -> dict[str, Any]:
    return summarise_runs(results, [None] * len(results), "me")


def test_the_fastest_draft_of_each_batch() -> None:
    got = found(
        result("chain:2", {1: 1.5, 4: 1.29, 16: 0.9}),
        result("chain:4", {1: 1.8, 4: 1.1, 16: 0.7}),
        result("tree:24,4,5", {1: 1.76, 4: 1.3, 16: 0.5}),
    )
    assert [row["draft"] for row in got["best"]] == ["chain:4", "tree:24,4,5", "none"]
    assert [row["close"] for row in got["best"]] == [["tree:24,4,5"], ["chain:2"], []]
    assert got["batch_limit"] == 4 and got["warnings"] == ["the same"]
    lines = list(advice(got))
    assert lines[0] == (
        "batch 1: chain:4, 1.80 times plain decoding; no worse within the noise: tree:24,4,5"
    )
    assert lines[2:] == [
        "batch 16: no draft pays; decode plainly",
        "speculation pays up to batch 4; switch it off above",
    ]


def test_a_gap_ends_the_limit() -> None:
    """What pays again at a larger size is noise, or a size nobody can rely on."""
    got = found(result("chain:2", {1: 1.2, 4: 0.9, 16: 1.1}))
    assert got["batch_limit"] == 1


def test_nothing_pays_and_everything_does() -> None:
    assert list(advice(found(result("chain:2", {1: 0.9}))))[-1].startswith("speculation does not")
    assert list(advice(found(result("chain:2", {1: 1.9}))))[-1].endswith("measured, up to 1")


def test_a_fail_is_said() -> None:
    wrong = result("chain:2", {1: 1.9}) | {"equality": {"fails": 3}}
    assert list(advice(found(wrong)))[-1] == "chain:2: 3 output tokens are NOT the target's own"


@pytest.fixture(scope="module")
def settings(
    folders: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> EvalSettings:
    target, head, prompts = map(str, folders)
    return EvalSettings(
        target=target,
        head=head,
        prompts=prompts,
        max_new_tokens=4,
        device="cpu",
        batch=(1, 2),
        context=(48, 64),
        out=str(tmp_path_factory.mktemp("tune")),
    )


@pytest.fixture(scope="module")
def tuned(settings: EvalSettings) -> dict[str, Any]:
    return tune(settings, ["chain:1", "tree:4,2,2"])


def test_every_draft_has_a_run_of_its_own(tuned: dict[str, Any], settings: EvalSettings) -> None:
    out = Path(settings.out or "")
    assert [run["draft"] for run in tuned["runs"]] == ["chain:1", "tree:4,2,2"]
    assert json.loads((out / "tune.json").read_text()) == tuned
    assert (out / "tune.png").exists() == can_plot()
    for run in tuned["runs"]:
        own = json.loads((Path(run["folder"]) / "result.json").read_text())
        assert own["overall"]["tau"] == run["tau"] and own["setup"]["draft"] == run["draft"]
        assert run["fails"] == 0 and [row["batch"] for row in run["speed"]] == [1, 2]
        assert set(run["contexts"]["colours"]) == {"48", "64"}
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    print_tune(tuned, console)
    assert "tree:4,2,2" in console.export_text()


def test_finished_runs_are_not_repeated(tuned: dict[str, Any], settings: EvalSettings) -> None:
    counted: list[str] = []
    again = tune(
        settings,
        ["chain:1", "tree:4,2,2", "chain:2"],
        lambda done, total, label: counted.append(label),
    )
    assert again["runs"][:2] == tuned["runs"]
    assert {label.split(",")[0] for label in counted} == {"chain:2"}


def test_other_settings_in_the_same_folder(tuned: dict[str, Any], settings: EvalSettings) -> None:
    with pytest.raises(HeadsmithError, match="holds a run with other settings"):
        tune(replace(settings, max_new_tokens=5), ["chain:1"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"baseline": False}, "tune compares with plain decoding"),
        ({"drafter": "none", "draft": ""}, "nothing to tune"),
        ({"drafter": "lookahead", "draft": ""}, "lookahead has no draft shape"),
    ],
)
def test_what_cannot_be_tuned(
    changes: dict[str, Any], message: str, settings: EvalSettings
) -> None:
    with pytest.raises(HeadsmithError, match=message):
        tune(replace(settings, out=None, **changes))


def test_the_command(folders: tuple[Path, Path, Path]) -> None:
    target, head, prompts = map(str, folders)
    arguments = ["--target", target, "--head", head, "--prompts", prompts, "--device", "cpu"]
    arguments += ["--draft", "chain:2", "--batch", "1", "--max-new-tokens", "3", "--json", "-"]
    done = CliRunner().invoke(tune_, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["schema"] == "headsmith.tune/1"
    assert "drafts" in done.stderr
