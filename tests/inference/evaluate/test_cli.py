"""`headsmith eval`: where its words go, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headsmith.cli import cli, run
from headsmith.errors import EqualityFailed
from headsmith.inference import equality
from headsmith.inference.equality import Equality
from headsmith.inference.evaluate import raise_if_unequal


def arguments(folders: tuple[Path, Path, Path], *more: str) -> list[str]:
    target, head, prompts = folders
    return [
        "eval",
        f"--target={target}",
        f"--head={head}",
        f"--prompts={prompts}",
        "--max-new-tokens=2",
        "--device=cpu",
        *more,
    ]


def test_json_on_stdout_is_alone_there(folders: tuple[Path, Path, Path]) -> None:
    outcome = CliRunner().invoke(cli, arguments(folders, "--json", "-", "--batch", "1,2"))
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert result["setup"]["batch"] == [1, 2]
    assert "tau = committed tokens / verification passes" in outcome.stderr.replace("\n", "")


def test_json_to_a_file_leaves_the_table_on_stdout(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    outcome = CliRunner().invoke(cli, arguments(folders, "--json", str(path), "--no-baseline"))
    assert outcome.exit_code == 0, outcome.output
    assert "acceptance" in outcome.stdout
    assert json.loads(path.read_text())["speed"][0]["speedup"] is None


def test_failed_equality_is_exit_code_3_after_everything_is_written(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Equality(24, 23, 0, 1, {"id": "0", "index": 3, "margin": 1.5})
    monkeypatch.setattr(equality, "check_equality", lambda *args, **kwargs: bad)
    path, out = tmp_path / "r.json", tmp_path / "out"
    code = run(cli, arguments(folders, "--json", str(path), "--out", str(out)))
    assert code == 3
    for written in (path, out / "result.json"):
        assert json.loads(written.read_text())["equality"]["fails"] == 1
    with pytest.raises(EqualityFailed, match="1 of 24 output tokens.*fault of the decoder"):
        raise_if_unequal(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--draft=chain:-1"], "depth is -1"),
        (["--batch=two"], "is not a list of batch sizes"),
        (["--target=/no/such/model"], "/no/such/model"),
        (["--prompts=/no/such/prompts.jsonl"], "neither a file nor a task"),
        (["--prompts=gsm8k", "--data-dir=/no/such/folder"], "there is no gsm8k.jsonl"),
        (["--head=/no/such/head"], "there is no head in"),
        (["--system-prompt=" + "long " * 60], "the target's context holds 160"),
    ],
)
def test_mistakes_end_in_one_sentence_and_exit_code_2(
    folders: tuple[Path, Path, Path],
    more: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(cli, arguments(folders, *more)) == 2
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if "headsmith: error:" in line]
    assert len(said) == 1 and sentence in said[0]
    assert "Traceback" not in captured.err


def test_target_is_taken_from_the_head(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["eval", f"--head={folders[1]}", f"--prompts={folders[2]}"]) == 2
    assert "has no headsmith.json that names its target; add --target" in capsys.readouterr().err


def test_a_gate_decides_the_exit_code_after_everything_is_written(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, out = tmp_path / "gate.yaml", tmp_path / "r.json"
    more = (f"--gate={gate}", f"--json={out}", "--no-baseline")
    gate.write_text("- {metric: tau, min: 1}\n- {metric: equality_fails, max: 0}\n")
    assert run(cli, arguments(folders, *more)) == 0
    assert [row["met"] for row in json.loads(out.read_text())["gate"]] == [True, True]
    gate.write_text("- {metric: tau, min: 9}\n- {metric: u_1, task: colours, min: 2}\n")
    capsys.readouterr()
    assert run(cli, arguments(folders, *more)) == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "tau of all prompts is" in line and "; u_1 of colours is" in line
    assert " ".join(said.out.split()).count("gate MISSED: ") == 2
    assert [row["met"] for row in json.loads(out.read_text())["gate"]] == [False, False]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- {metric: taw, min: 1}", "metric 'taw' is unknown"),
        ("- {metric: tau, task: maths, min: 1}", "task 'maths', which is not among the prompts"),
    ],
)
def test_a_gate_of_unknown_names_is_exit_code_2(
    text: str,
    sentence: str,
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    assert run(cli, arguments(folders, f"--gate={tmp_path / 'gate.yaml'}")) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("headsmith: error: ") and sentence in said


def test_counters_that_cannot_be_served_are_refused(
    folders: tuple[Path, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(cli, arguments(folders, "--metrics-port=70000")) == 2
    assert "metrics-port is 70000" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert run(cli, arguments(folders, "--metrics-port=9100")) == 4
    assert "pip install 'headsmith[metrics]'" in capsys.readouterr().err
