"""benchmarks/decode.py on tiny models, and what of benchmarks/gpu.sh takes no minutes in the
interpreter; `gpu.sh --dry` goes through all of it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from headsmith.inference import machine
from headsmith.inference.accept import Greedy, follow
from headsmith.inference.judging import nodes_of
from headsmith.inference.stop import StopRule
from headsmith.inference.tree import Tree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target


@pytest.fixture(scope="module")
def head_dir(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh head of the tiny target."""
    folder = tmp_path_factory.mktemp("gpu") / "head"
    target = Target.load(tiny_target_dir)
    ids = torch.arange(target.vocab_size)
    Eagle3Head.for_target(target, ids, taps=(0, 1, 2)).save(folder)
    return folder


def test_a_gpu_is_asked_for(root: Path, tmp_path: Path) -> None:
    script = root / "benchmarks" / "gpu.sh"
    said = subprocess.run([str(script)], capture_output=True, text=True)
    assert said.returncode == 2 and "--head DIR is missing" in said.stderr
    command = [sys.executable, str(root / "benchmarks" / "gpu_kernels.py")]
    environment = {**os.environ, "HEADSMITH_KERNELS": "auto", "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 4 and "there is no GPU here" in said.stderr


@pytest.mark.slow
def test_every_kernel_is_beside_its_reference(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    command = [sys.executable, str(root / "benchmarks" / "gpu_kernels.py"), "--dry"]
    environment = {**os.environ, "HEADSMITH_KERNELS": "on", "TRITON_INTERPRET": "1"}
    said = subprocess.run(
        [*command, f"--json={path}"], capture_output=True, text=True, env=environment
    )
    assert said.returncode == 0, said.stdout + said.stderr
    rows = json.loads(path.read_text())
    assert len(rows) > 30 and all(row["good"] for row in rows)


@pytest.fixture
def decode(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/decode.py"""
    monkeypatch.syspath_prepend(root / "benchmarks")
    monkeypatch.setitem(machine.BYTES, "cpu", 2**16)
    monkeypatch.setitem(machine.SIDE, "cpu", 16)
    return importlib.import_module("decode")


@pytest.mark.slow
def test_overhead_is_measured_in_turn_with_generate(
    decode: ModuleType, tiny_target_dir: Path, head_dir: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("red", "tea", "a")))
    path = tmp_path / "decode.json"
    arguments = [f"--target={tiny_target_dir}", f"--head={head_dir}", f"--prompts={prompts}"]
    arguments += ["--device=cpu", "--max-new-tokens=8", f"--json={path}", "--no-verdict"]
    said = CliRunner().invoke(decode.main, arguments)
    assert said.exit_code == 0, said.output
    found = json.loads(path.read_text())
    assert found["requests"] == found["texts_of_generate"] == found["texts_of_plain"] == 1
    assert found["predicted_speedup"] == pytest.approx(
        found["tau"] / found["costs"]["model"]["break_even"]
    )
    assert found["of_prediction"] == pytest.approx(found["speedup"] / found["predicted_speedup"])
    assert min(found["plain_tokens_per_s"], found["generate_tokens_per_s"]) > 0


def test_forced_acceptance_follows_a_deepest_path(
    root: Path, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path
) -> None:
    monkeypatch.syspath_prepend(root / "benchmarks")
    gpu_forced = importlib.import_module("gpu_forced")
    parents = [[-1, 0, 0, 2, 3], [-1, 0, 1, 0, 0]]
    path, depths = gpu_forced.deepest(torch.tensor(parents))
    assert [row.nonzero().flatten().tolist() for row in path] == [[0, 2, 3, 4], [0, 1, 2]]
    assert depths.tolist() == [[0, 1, 1, 2, 3], [0, 1, 2, 1, 1]]
    assert gpu_forced.deepest(torch.tensor([[-1]]))[0].tolist() == [[True]]

    rows = [[5, 1, 2, 3, 0], [7, 8, 9, 1, 2]]
    trees = [Tree(*pair) for pair in zip(rows, parents, strict=True)]
    nodes = nodes_of(torch.tensor(rows).flatten(), trees)
    stop = StopRule(frozenset(), 99, 99)
    forced = gpu_forced.Forced(Target.load(tiny_target_dir), Greedy(), stop, tau=2.5)
    kept = []
    for _ in range(4):
        chosen = forced.chosen(torch.full((10,), 11), lambda: nodes).view(2, 5).tolist()
        kept.append([len(follow(*pair).path) for pair in zip(trees, chosen, strict=True)])
    # What is owed to 2.5 tokens a round comes later; a path of two drafts has no more to give.
    assert kept == [[2, 2], [3, 3], [2, 2], [3, 3]]
