"""The interval keeps its word: 95 percent of the intervals hold the tau of all prompts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from headsmith.inference.records import Steps

SETS, PROMPTS = 200, 40


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    """benchmarks/coverage.py"""
    path = root / "benchmarks" / "coverage.py"
    spec = importlib.util.spec_from_file_location("coverage_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def everything(drawn: Callable[..., list[Steps]]) -> list[Steps]:
    """600 conversations of two turns, whose chance differs much from one to the next."""
    return drawn(3, 600, turns=2, alpha=0.6, spread=0.15)


@pytest.mark.slow
def test_the_interval_holds_the_whole_tau_as_often_as_it_says(
    script: ModuleType, everything: list[Steps]
) -> None:
    assert len(script.conversations(everything)) == 600
    assert 0.90 <= script.coverage(everything, SETS, PROMPTS, seed=5) <= 0.98


@pytest.mark.slow
def test_turns_drawn_apart_would_promise_too_much(
    script: ModuleType, everything: list[Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    resample = script.resample

    def apart(*args: object) -> list[Steps]:
        return [replace(one, id=one.id.replace("#", "-")) for one in resample(*args)]

    monkeypatch.setattr(script, "resample", apart)
    assert script.coverage(everything, SETS, PROMPTS, seed=5) < 0.90


@pytest.mark.slow
def test_the_script_reads_a_run_and_fails_where_the_promise_is_broken(
    script: ModuleType, everything: list[Steps], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in everything[:200]))
    said = CliRunner().invoke(script.main, [str(path), "--sets=40"])
    assert said.exit_code in (0, 1) and "of 100 conversations" in said.output
    monkeypatch.setattr(script, "bootstrap_tau", lambda steps, seed: [0.0, 99.0])
    always = CliRunner().invoke(script.main, [str(path), "--sets=5"])
    assert always.exit_code == 1 and "100.0% of 5 sets" in always.output
