"""benchmarks/curve.py on the logs of a run, as training writes them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner


@pytest.fixture(scope="module")
def curve(root: Path) -> ModuleType:
    """benchmarks/curve.py"""
    spec = importlib.util.spec_from_file_location("curve", root / "benchmarks" / "curve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks for its module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, steps: int, taus: dict[int, float | None]) -> None:
    def trained(step: int) -> dict[str, Any]:
        return {"step": step, "tokens": 1000, "seconds": 30.0, "predicted_tau": step / 10}

    def validated(step: int, tau: float | None) -> dict[str, Any]:
        return {"step": step, "tau": tau, "tau_ci": [1.0, 2.0], "per_position": [0.5, 0.25]}

    write_lines(folder / "metrics.jsonl", [trained(step) for step in range(1, steps + 1)])
    write_lines(folder / "validation.jsonl", [validated(*pair) for pair in taus.items()])


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_row_counts_what_was_trained_until_then(curve: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path, 20, {10: 1.5, 15: None, 20: 1.75})
    picture = tmp_path / "curve.svg"
    result = CliRunner().invoke(curve.main, [str(tmp_path), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    rows = result.output.splitlines()[2:4]
    assert rows[0] == "| 10 | 10,000 | 5 | 1.50 (1.00 .. 2.00) | .500 .250 | 0.55 |"
    # The mean over all since the row before: nothing was measured at 15.
    assert rows[1] == "| 20 | 20,000 | 10 | 1.75 (1.00 .. 2.00) | .500 .250 | 1.55 |"
    drawn = picture.read_text()
    assert "<svg" in drawn and "million training tokens" in drawn.replace("<!-- ", "")
    assert "dc:date" not in drawn


def test_a_continued_run_counts_its_steps_once(curve: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path, 10, {10: 1.5})
    log = tmp_path / "metrics.jsonl"
    log.write_text(log.read_text() + log.read_text().splitlines()[-1] + "\n")
    assert [point.tokens for point in curve.points(tmp_path)] == [10_000]


@pytest.mark.parametrize("missing", ["metrics.jsonl", "validation.jsonl"])
def test_a_folder_that_is_no_run(curve: ModuleType, tmp_path: Path, missing: str) -> None:
    write_run(tmp_path, 10, {10: 1.5})
    (tmp_path / missing).unlink()
    result = CliRunner().invoke(curve.main, [str(tmp_path)])
    assert result.exit_code == 1 and result.output.startswith("Error: ")
    assert f"{missing} is not a log of a training run" in result.output


def test_damaged_and_empty_logs(curve: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path, 10, {10: None})
    result = CliRunner().invoke(curve.main, [str(tmp_path)])
    assert result.exit_code == 1 and "no checkpoint of" in result.output
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tok')
    result = CliRunner().invoke(curve.main, [str(tmp_path)])
    assert result.exit_code == 1 and "is not a log of a training run" in result.output
