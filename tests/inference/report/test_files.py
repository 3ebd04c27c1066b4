"""The report's files: every figure in them is the result's, and the page needs no other."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headsmith.cli import cli, run
from headsmith.inference import plots
from headsmith.inference.records import Steps
from headsmith.inference.report_files import write_report

ALWAYS = {"summary.md", "acceptance.csv", "speed.csv", "report.html"}


@pytest.fixture(scope="module")
def result(drawn: Callable[..., list[Steps]], result_of: Callable[..., Any]) -> dict[str, Any]:
    """Two tasks at two lengths and two batch sizes: every axis that there is a plot for."""
    records = [
        one
        for task in ("chat", "code")
        for length in (200, 900)
        for one in drawn(length, 12, task=f"{task}@{length}", alpha=0.6 - length / 9000)
    ]
    given: dict[str, Any] = result_of(records, context=[200, 900])
    given["degenerate"] = {
        "answers": 25,
        "kinds": {"loop": 25},
        "which": [{"id": str(i), "task": "code@200", "kind": "loop"} for i in range(25)],
    }
    given["gate"] = [{"met": False, "says": "tau of chat is low"}]
    return given


class Links(HTMLParser):
    """What a page refers to, and the text of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


@pytest.mark.slow
def test_every_axis_has_its_plot_and_the_page_holds_them(
    result: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    write_report(tmp_path, result)
    drawn = {"positions", "histogram", "depth", "context", "batch", "speedup"}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ALWAYS | {f"{name}.png" for name in drawn}
    for name in drawn:
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
    text = (tmp_path / "report.html").read_text()
    links = Links()
    links.feed(text)
    assert links.tags.count("img") == 6
    assert all(link.startswith("data:image/png;base64,") for link in links.found)
    assert not re.search(r"https?://|url\(|@import|<script|<link", text)
    assert "something &lt;to&gt; know" in text and "<to>" not in text
    for words in ("all (pooled)", "chat@900", "MISSED", "5 more are named in result.json"):
        assert words in text
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"]({name}.png)" in summary for name in drawn)


@pytest.mark.slow
def test_a_run_without_an_axis_has_no_such_plot(
    drawn: Callable[..., list[Steps]], result_of: Callable[..., Any], one_record: Any
) -> None:
    pytest.importorskip("matplotlib")
    files = [one.file for one in plots.draw_all(result_of(drawn(1, 3), batches=(1,)))]
    assert files == ["positions.png", "histogram.png", "depth.png"]
    plain = result_of([one_record("0", "chat", [0] * 4, depth=0)], batches=(1, 2))
    assert [one.file for one in plots.draw_all(plain)] == ["speedup.png"]


def test_contexts_are_lines_by_length(result: dict[str, Any]) -> None:
    found = plots.contexts(result)
    assert {task: [length for length, _ in points] for task, points in found.items()} == {
        "chat": [200, 900],
        "code": [200, 900],
    }
    assert found["code"][1][1] is result["tasks"]["code@900"]


def test_without_matplotlib_there_is_one_line_instead(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    write_report(tmp_path, result)
    assert {path.name for path in tmp_path.iterdir()} == ALWAYS
    text = (tmp_path / "report.html").read_text()
    assert text.count("matplotlib is not installed") == 1 and "<img" not in text


def test_csv_and_markdown_hold_the_figures_of_the_result(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    write_report(tmp_path, result)
    with open(tmp_path / "acceptance.csv", newline="") as file:
        rows = {row["task"]: row for row in csv.DictReader(file)}
    assert list(rows) == [*result["tasks"], "overall"]
    for name, metrics in [*result["tasks"].items(), ("overall", result["overall"])]:
        row = rows[name]
        for key in ("tau", "tau_macro", "requests", "tokens", "passes", "nodes_per_token"):
            assert float(row[key]) == metrics[key]
        assert [float(row["tau_low"]), float(row["tau_high"])] == metrics["tau_ci"]
        assert [float(row[f"u_{i}"]) for i in range(1, 5)] == metrics["per_position"]
        assert [int(row[f"accepted_{i}"]) for i in range(5)] == metrics["histogram"]
        assert int(row["cut_by_eos"]) == 0
    with open(tmp_path / "speed.csv", newline="") as file:
        speed = list(csv.DictReader(file))
    assert [(row["batch"], float(row["itl_ms_p95"])) for row in speed] == [("1", 40), ("4", 40)]
    lines = (tmp_path / "summary.md").read_text().splitlines()
    tau, (low, high) = (result["tasks"]["code@900"][key] for key in ("tau", "tau_ci"))
    (row,) = [line for line in lines if line.startswith("| code@900 | 12 |")]
    assert f"| {tau:.2f} | {low:.2f} .. {high:.2f} |" in row
    assert r"| command | headsmith eval --head 'a\|b' |" in lines


def test_a_report_is_written_again_from_the_result(
    drawn: Callable[..., list[Steps]],
    save_run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_run("run", drawn(1, 3))
    before = (folder / "result.json").read_bytes()
    (folder / "context.png").write_bytes(b"of an earlier run")
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    assert run(cli, ["report", str(folder)]) == 0
    said = capsys.readouterr()
    assert "matplotlib is not installed" in said.err and "report.html" in said.out
    raw = {"result.json", "steps.jsonl"}
    assert {path.name for path in folder.iterdir()} == ALWAYS | raw
    assert (folder / "result.json").read_bytes() == before
    assert run(cli, ["report", str(folder / "nothing")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no" in line and "name a folder that headsmith eval --out wrote" in line
