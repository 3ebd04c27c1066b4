"""benchmarks/drafters.py and benchmarks/given_text.py, on a tiny target."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from headsmith.cli import run
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.loading import load_model
from headsmith.models.target import Target

Script = Callable[[str], ModuleType]


@pytest.fixture
def script(root: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """script(name): a benchmark, as it is when it is launched by path."""
    monkeypatch.syspath_prepend(root / "benchmarks")
    return importlib.import_module


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two tasks of one prompt and of two."""
    rows = [
        {"prompt": "red", "task": "a"},
        {"prompt": "tea", "task": "b"},
        {"prompt": "x", "task": "b"},
    ]
    path = tmp_path_factory.mktemp("asked") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--prompts={path}"


@pytest.mark.slow
def test_drafters_are_compared_in_one_table(
    script: Script, asked: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    drafters = script("drafters")
    target = Target.load(tiny_target_dir)
    Eagle3Head.for_target(target, torch.arange(target.vocab_size)).save(tmp_path / "head")
    out = tmp_path / "drafters.json"
    names = ["ngram", "lookahead:3,3,2", "cut:2"]
    arguments = [f"mine={tmp_path / 'head'}", f"--target={tiny_target_dir}", asked, "--device=cpu"]
    arguments += [*(f"--drafter={name}" for name in names), "--max-new-tokens=6", f"--json={out}"]
    said = CliRunner().invoke(drafters.main, arguments)
    assert said.exit_code == 0, said.output
    rows = json.loads(out.read_text())["rows"]
    every = ["nothing", *names, "mine"]
    assert [(r["temperature"], r["name"]) for r in rows] == [(t, n) for t in (0, 1) for n in every]
    for row in rows:
        assert row["metrics"]["requests"] == row["same_as_plain"] == 3
        assert row["equality"]["exact"] == row["equality"]["checked"] == row["metrics"]["tokens"]
        assert set(row["tasks"]) == {"a", "b"}
        assert 0 <= row["hit"] <= 1 and (row["hit"] == 0 or row["name"] != "nothing")
    by_name = {row["name"]: row for row in rows}
    assert by_name["nothing"]["metrics"]["tau"] == by_name["nothing"]["speed"]["speedup"] == 1
    assert by_name["cut:2"]["drafter"].startswith("model:") and by_name["mine"]["hit"] == 1
    for word in ("tau a", "tau b", "lookahead:3,3,2", "3 of 3", "cut:2"):
        assert word in said.output


def test_a_cut_is_the_targets_first_blocks(
    script: Script, tiny_target_dir: Path, tmp_path: Path
) -> None:
    path = script("drafters").cut(str(tiny_target_dir), 2, tmp_path / "cut")
    whole, part = (load_model(str(p), None, torch.float32)[0] for p in (tiny_target_dir, path))
    ids = torch.tensor([[3, 5, 7]])
    before_block = whole(ids, output_hidden_states=True).hidden_states[2]
    expected = whole.lm_head(whole.model.norm(before_block))
    torch.testing.assert_close(part(ids).logits, expected)


@pytest.mark.parametrize("text", ["cut:8", "cut:0", "cut:x", "cut"])
def test_a_cut_that_is_none(
    text: str,
    script: Script,
    asked: str,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [f"--target={tiny_target_dir}", asked, f"--drafter={text}", "--device=cpu"]
    assert run(script("drafters").main, arguments) == 2
    assert "cut" in capsys.readouterr().err


def test_words_are_edited(script: Script) -> None:
    edited = script("given_text").edited
    text = " ".join(f"w{i}" for i in range(100))
    assert edited(text, 0, random.Random(0)) == text
    for percent in (5, 20):
        left = set(text.split()) - set(edited(text, percent, random.Random(1)).split())
        # Some words have another before them and are still there.
        assert percent / 3 < len(left) <= percent
    assert edited("", 5, random.Random(0)) == "" and edited("one", 5, random.Random(3)) != "one"


@pytest.mark.slow
def test_edits_are_measured(
    script: Script, asked: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "edits.json"
    arguments = [f"--target={tiny_target_dir}", asked, "--device=cpu", "--change=0,30"]
    arguments += ["--max-new-tokens=24", f"--json={out}"]
    said = CliRunner().invoke(script("given_text").main, arguments)
    assert said.exit_code == 0, said.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["percent"] for row in rows] == [0, 30]
    for row in rows:
        assert row["metrics"]["requests"] == row["same_as_plain"] == 3
        assert row["equality"]["fails"] == 0
        assert row["metrics"]["nodes_per_token"] > 0
    assert "30 %" in said.output


@pytest.mark.slow
def test_every_drafter_gives_the_plain_text(
    script: Script, asked: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    target = Target.load(tiny_target_dir)
    Eagle3Head.for_target(target, torch.arange(target.vocab_size)).save(tmp_path / "head")
    names = [f"{tmp_path / 'head'}=chain:3", "ngram=chain:2", "lookahead:3,3,2", "cut:2=chain:2"]
    # The target as its own small model is right where no noise decides.
    names += [f"model:{tiny_target_dir}=chain:2", "text=chain:4"]
    arguments = [*names, f"--target={tiny_target_dir}", asked, "--batch=1,2", "--no-penalties"]
    out = tmp_path / "coupled.json"
    arguments += ["--temperature=0,0.7", "--max-new-tokens=6", f"--json={out}"]
    said = CliRunner().invoke(script("coupled").main, arguments)
    assert said.exit_code == 0, said.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 2 * len(names)
    assert all(row["same"] == row["requests"] == 3 and row["fails"] == 0 for row in rows)
    assert {row["drafter"] for row in rows} >= {"ngram", "lookahead:3,3,2", "cut:2", "text"}
    right = [r for r in rows if r["drafter"].startswith("model:") and r["temperature"] == 0]
    assert all(row["tau"] > 2 for row in right)


@pytest.mark.parametrize(
    ("name", "said"), [("none", "names no drafter"), ("HEAD", "give the head")]
)
def test_a_coupled_run_of_nothing(
    name: str,
    said: str,
    script: Script,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = name.replace("HEAD", str(tiny_target_dir))
    assert run(script("coupled").main, [name, f"--target={tiny_target_dir}"]) == 2
    assert said in capsys.readouterr().err
