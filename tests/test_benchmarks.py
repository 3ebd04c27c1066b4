"""Scripts of benchmarks/ that others rely on, on a tiny target."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from headsmith.cli import run
from headsmith.inference.calibrate import calibrate
from headsmith.inference.records import Request
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import write_calibration
from headsmith.models.target import Target

PATHS = {"eagle3": "old", "eagle3.1": "new", "medusa": "medusa"}


@pytest.fixture(scope="module")
def heads(root: Path) -> ModuleType:
    """benchmarks/heads.py"""
    spec = importlib.util.spec_from_file_location("heads", root / "benchmarks" / "heads.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def arguments(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A head of each kind, prompts, and options for a quick run."""
    folder = tmp_path_factory.mktemp("heads")
    target = Target.load(tiny_target_dir)
    ids = torch.arange(target.vocab_size)
    Eagle3Head.for_target(target, ids).save(folder / "old")
    Eagle3Head.for_target(target, ids, fc_norm=True, norm_output=True).save(folder / "new")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("red", "tea", "a")))
    medusa = MedusaHead.for_target(target, num_heads=5)
    medusa.save(folder / "medusa")
    tree = calibrate(medusa, target, [Request("0", "task", [3, 5])], nodes=6)
    write_calibration(folder / "medusa", tree)
    found = [f"{name}={folder / path}" for name, path in PATHS.items()]
    found += [f"--target={tiny_target_dir}", f"--prompts={prompts}", "--context=210,300"]
    return [*found, "--max-new-tokens=6", "--device=cpu"]


@pytest.mark.slow
def test_heads_are_compared_in_one_table(
    heads: ModuleType, arguments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "heads.json"
    said = CliRunner().invoke(heads.main, [*arguments, f"--json={path}"])
    assert said.exit_code == 0, said.output
    written = json.loads(path.read_text())
    rows = written["rows"]
    assert [(r["context"], r["draft"], r["head"]) for r in rows] == [
        (context, draft, head)
        for context in (210, 300)
        for draft in ("chain:5", "tree:24,4,5")
        for head in PATHS
    ]
    for row in rows:
        assert row["metrics"]["requests"] == row["same_as_plain"] == 3
        # A tree spends its nodes on width where depth is unlikely.
        depth = len(row["metrics"]["per_position"])
        assert depth == 5 if row["draft"] == "chain:5" else 1 <= depth <= 5
        assert row["metrics"]["nodes_per_token"] > 1
        assert row["speed"]["speedup"] > 0
        equality = row["equality"]
        assert equality["exact"] == equality["checked"] == row["metrics"]["tokens"] > 0
    for word in ("u5", "3 of 3", "eagle3.1", "tree:24,4,5", "leads in tau"):
        assert word in said.output
    # No figure is cut short where the output is no terminal.
    assert "\N{HORIZONTAL ELLIPSIS}" not in said.output
    assert len(written["leaders"]) == 8 and all(line in said.output for line in written["leaders"])


def test_the_leader_is_the_highest_and_by_how_much(heads: ModuleType) -> None:
    rows = [
        {
            "context": 200,
            "draft": "chain:5",
            "head": head,
            "metrics": {"tau": tau},
            "speed": {"speedup": None},
        }
        for head, tau in (("a", 1.5), ("b", 2.0), ("c", 1.6))
    ]
    (line,) = heads.leaders(rows)
    assert line == "200 tokens, chain:5: b leads in tau, 2.000, which is 0.400 (25.0%) more than c"


@pytest.mark.parametrize(
    ("heads_given", "sentence"),
    [(["out/best"], "is not of the form NAME=DIR"), (["a=x", "a=y"], "have the same name")],
)
def test_heads_that_cannot_be_told_apart(
    heads: ModuleType,
    heads_given: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(heads.main, heads_given) == 2
    assert sentence in capsys.readouterr().err
