"""Drift as it is reported: the table, the CSV, the plot and the command."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from headsmith.cli import cli, run
from headsmith.inference import diagnose_report, plots
from headsmith.inference.diagnose import (
    FIGURES,
)
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

ROWS = [
    {
        "context": context,
        "depth": depth,
        "mean_context": 210.0,
        **dict.fromkeys(FIGURES, 0.25),
        "conditional": 0.5 if depth < 3 else None,
        "reached": 8 >> depth,
        "passes": 8,
    }
    for context in ("200", "1500")
    for depth in (1, 2, 3)
]
DRIFT = {"draft": "chain:3", "sink_tokens": 4, "grouped_by": "prompt length", "rows": ROWS}


def printed(drift: dict[str, Any]) -> str:
    text = io.StringIO()
    diagnose_report.print_diagnosis({"drift": drift}, Console(file=text, width=80))
    return text.getvalue()


def test_the_table_fits_a_terminal() -> None:
    lines = printed(DRIFT).splitlines()
    assert max(map(len, lines)) <= 80
    (first,) = [line for line in lines if line.split()[:2] == ["200", "1"]]
    assert first.split() == "200 1 0.25 0.25 25.0 % 25.0 % 25.0 % 50.0 % 4".split()
    assert sum(line.split()[-2:-1] == ["-"] for line in lines) == 2, "no value, no number"
    assert "nothing to show" in printed(DRIFT | {"rows": []})


def test_the_csv_holds_the_rows() -> None:
    read = list(csv.DictReader(io.StringIO(diagnose_report.drift_csv(ROWS))))
    assert [{k: str(v) if v is not None else "" for k, v in row.items()} for row in ROWS] == read
    assert diagnose_report.drift_csv([]) == ""


@pytest.mark.slow
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    diagnose_report.plot_drift(ROWS, tmp_path / "drift.png")
    data = (tmp_path / "drift.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
    assert [path.name for path in tmp_path.iterdir()] == ["drift.png"]


@pytest.fixture(scope="module")
def arguments(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`headsmith eval --diagnose drift` on a tiny target."""
    root = tmp_path_factory.mktemp("drift")
    target = Target.load(tiny_target_dir)
    Eagle3Head.for_target(target, torch.arange(target.vocab_size)).save(root / "head")
    rows = [{"prompt": text} for text in ("red green", "one two", "tea", "sun moon sea")]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"target": tiny_target_dir, "head": root / "head", "prompts": root / "prompts.jsonl"}
    given = [f"--{name}={value}" for name, value in options.items()]
    return ["eval", *given, "--max-new-tokens=4", "--device=cpu", "--no-baseline"]


def diagnosed(arguments: list[str], out: Path, *more: str) -> tuple[dict[str, Any], Result]:
    said = CliRunner().invoke(cli, [*arguments, "--diagnose=drift", f"--out={out}", *more])
    assert said.exit_code == 0, said.output
    return json.loads((out / "result.json").read_text()), said


@pytest.mark.slow
def test_the_command_writes_table_json_and_csv(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    more = ("--context=250,400", "--diagnose-depth=3")
    result, said = diagnosed(arguments, tmp_path, *more)
    drift = result["diagnosis"]["drift"]
    assert [(row["context"], row["depth"]) for row in drift["rows"]] == [
        (context, depth) for context in ("250", "400") for depth in (1, 2, 3)
    ]
    assert set(result["tasks"]) == {"prompts@250", "prompts@400"}
    assert result["overall"]["requests"] == 8 and result["setup"]["context"] == [250, 400]
    assert "chain:3, by prompt length" in said.stdout and "attention" in said.stdout
    # Of this machine, not of what was measured.
    assert "headsmith[report]" in said.stderr
    assert "headsmith[report]" not in "".join(result["warnings"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *("result.json", "steps.jsonl", "responses.jsonl", "drift.csv"),
        *("summary.md", "acceptance.csv", "speed.csv", "report.html"),
    }
    assert len((tmp_path / "drift.csv").read_text().splitlines()) == 7


@pytest.mark.slow
def test_with_matplotlib_there_is_a_plot(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, said = diagnosed(arguments, tmp_path, "--limit=2")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert "headsmith[report]" not in said.output
    assert result["diagnosis"]["drift"]["grouped_by"] == "committed tokens"
    assert result["diagnosis"]["drift"]["draft"] == "chain:8"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--diagnose=weather"], "diagnose is 'weather'; it can be drift"),
        (["--diagnose=drift", "--drafter=none"], "drift is diagnosed of a head; add --head"),
        (["--diagnose=drift", "--diagnose-depth=0"], "diagnose-depth is 0"),
        (["--diagnose=drift", "--diagnose-depth=600"], "goes 600 tokens deep"),
        (["--context=short"], "is not a list of lengths in tokens"),
        (["--context=0"], "context is 0"),
        (["--context=200,200"], "name each length once"),
        (["--context=512"], "context 512 leaves no room"),
        (["--context=20"], "every prompt is longer than context 20"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, [*arguments, *more]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert sentence in said
