"""`headsmith doctor` and what `headsmith eval` makes of the findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headsmith.cli import cli, run
from headsmith.models.target import Target


def test_a_healthy_head(eagle: Any) -> None:
    outcome = CliRunner().invoke(cli, ["doctor", str(eagle.folder)])
    assert outcome.exit_code == 0, outcome.output
    assert "0 errors, 0 warnings, 0 notes" in outcome.stdout and "against" in outcome.stdout


def test_json_and_exit_code_of_a_broken_one(
    eagle: Any, tiny_target_dir: Path, tmp_path: Path
) -> None:
    eagle.config(tie_word_embeddings=True, max_position_embeddings=64)
    arguments = ["doctor", str(eagle.folder), "--target", str(tiny_target_dir), "--json"]
    outcome = CliRunner().invoke(cli, [*arguments, "-"])
    assert outcome.exit_code == 2
    said = json.loads(outcome.stdout)
    assert (said["schema"], said["errors"], said["warnings"]) == ("headsmith.doctor/1", 1, 1)
    assert [one["check"] for one in said["findings"]] == ["tied", "context"]
    assert "error tied: " in outcome.stderr and "warning context: " in outcome.stderr
    assert run(cli, [*arguments, str(tmp_path / "said.json")]) == 2
    assert json.loads((tmp_path / "said.json").read_text()) == said


def test_a_head_whose_target_is_elsewhere(eagle: Any) -> None:
    eagle.record(target__path="ORG/NAME")
    outcome = CliRunner().invoke(cli, ["doctor", str(eagle.folder)])
    assert outcome.exit_code == 0 and "alone; add --target" in outcome.stdout


def test_eval_refuses_before_the_target_is_loaded(
    eagle: Any,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "red"}\n')
    eagle.config(tie_word_embeddings=True, max_position_embeddings=64)
    loaded: list[str] = []
    load = Target.load
    monkeypatch.setattr(Target, "load", lambda path, **o: loaded.append(path) or load(path, **o))
    args = ["eval", f"--head={eagle.folder}", f"--prompts={tmp_path / 'p.jsonl'}", "--device=cpu"]
    args += ["--max-new-tokens=2", "--no-baseline", f"--json={tmp_path / 'r.json'}"]
    assert run(cli, args) == 2 and loaded == []
    assert "tie_word_embeddings" in capsys.readouterr().err
    assert run(cli, [*args, "--allow-mismatch"]) == 0 and loaded == [str(tiny_target_dir)]
    warnings = json.loads((tmp_path / "r.json").read_text())["warnings"]
    assert sum("tie_word_embeddings" in one or "64 positions" in one for one in warnings) == 2
