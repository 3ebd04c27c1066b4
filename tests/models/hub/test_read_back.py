"""Every option that takes a head takes the name of a repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.cli import cli, run
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.heads import Head
from headsmith.models.hub.pull import local_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target
from headsmith.train.parts import new_head
from headsmith.train.recipe import Recipe

NAME = "ORG/smith"


def push(folder: Path) -> None:
    args = ["push", str(folder), "--repo", NAME, "--base-model", "ORG/target"]
    assert run(cli, args) == 0


def equal(some: Head, other: Head) -> bool:
    tensors = other.state_dict()
    return all((tensors[name] == one).all() for name, one in some.state_dict().items())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    words = ("red green", "one two three", "blue")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    return path


def test_eval(hub: Any, head: Path, tiny_target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    push(head)
    out = tmp_path / "r.json"
    args = ["eval", f"--target={tiny_target_dir}", f"--prompts={prompts}", "--device=cpu"]
    args += ["--max-new-tokens=4", "--no-baseline", f"--json={out}"]
    assert run(cli, [*args, f"--head={NAME}@main"]) == 0
    there = json.loads(out.read_text())
    assert run(cli, [*args, f"--head={head}"]) == 0
    here = json.loads(out.read_text())
    assert there["head"].pop("path") != here["head"].pop("path")
    assert there["head"] == here["head"] and there["overall"] == here["overall"]


def test_doctor(hub: Any, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    push(head)
    capsys.readouterr()
    assert run(cli, ["doctor", NAME]) == 0
    assert f"{NAME} was checked alone" in capsys.readouterr().out


def test_calibrate(
    hub: Any, target: Target, tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    heads = MedusaHead.for_target(target, num_heads=3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    heads.save(tmp_path / "medusa")
    push(tmp_path / "medusa")
    args = ["calibrate", f"--target={tiny_target_dir}", f"--prompts={prompts}", "--nodes=12"]
    assert run(cli, [*args, f"--head={NAME}", "--max-new-tokens=16", "--device=cpu"]) == 0
    folder = local_head(NAME)
    assert (folder / "medusa_tree.json").is_file()
    # Only the copy here has the tree; the repository is as it was.
    assert "medusa_tree.json" not in hub.tree(NAME)


def test_init_from(hub: Any, head: Path, target: Target) -> None:
    push(head)
    recipe = Recipe.model_validate(
        {
            "target": {"path": target.path},
            "head": {"kind": "eagle3.1", "init_from": NAME},
            "data": {"source": "none"},
            "output": {"dir": "none"},
        }
    )
    corpus: Any = None
    begun = new_head(recipe, target, corpus, print)
    assert equal(begun, Eagle3Head.load(head, num_target_layers=8))
