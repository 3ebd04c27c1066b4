"""Twelve kinds of bad input, typed as a user would: one sentence, its exit code, nothing left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headsmith.cli import cli, run
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.provenance import target_info
from headsmith.models.target import Target

# Conversations never say "w", so a target may be broken for it and pass its check at loading.
WORDS = "one tea sun red blue milk".split()


@dataclass(slots=True)
class Parts:
    """A target, a head that belongs to it, prompts and conversations: all good."""

    target: Path
    head: Path
    prompts: Path
    data: Path


@dataclass(slots=True)
class User:
    """Types commands in `folder`, which holds nothing but `given` before them."""

    folder: Path
    parts: Parts
    capsys: pytest.CaptureFixture[str]

    def type(self, *args: object) -> tuple[int, list[str]]:
        """Exit code and lines of stderr."""
        self.capsys.readouterr()
        code = run(cli, [str(arg) for arg in args])
        return code, self.capsys.readouterr().err.splitlines()

    def eval(self, *more: object, **other: object) -> list[object]:
        known = {name: getattr(self.parts, name) for name in ("target", "head", "prompts")} | other
        options = [f"--{name}={value}" for name, value in known.items()]
        return [*("eval", *options, "--max-new-tokens=2", "--device=cpu", "--no-baseline"), *more]

    def train(self, *more: object, target: object = None, data: object = None) -> list[object]:
        recipe = self.folder.parent / "recipe.yaml"
        recipe.write_text(
            f"target: {{path: {target or self.parts.target}}}\n"
            "head: {draft_vocab_size: 64}\n"
            f"data: {{source: {data or self.parts.data}, max_length: 64, row_tokens: 64, "
            f"prepared_dir: {self.folder / 'prepared'}}}\n"
            "train: {tokens_per_step: 32, unroll_steps: 2, max_steps: 2}\n"
            f"output: {{dir: {self.folder / 'out'}, save_every: 1}}\n"
        )
        return ["train", recipe, *more]

    def prepare(self, source: object, target: object = None) -> list[object]:
        out = self.folder / "prepared"
        return ["data", "prepare", source, "--target", target or self.parts.target, "--out", out]

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def refused(
        self, args: list[object], sentence: str, code: int = 2, kept: tuple[Path, ...] = ()
    ) -> None:
        """The command ends with this one sentence and code, and leaves nothing behind but `kept`,
        whole already.
        """
        before = self.left()
        found, said = self.type(*args)
        assert len(said) == 1, said
        self.check(said[0], sentence)
        assert found == code
        more = {str(path.relative_to(self.folder)) for path in kept}
        assert sorted(set(self.left()) - set(before)) == sorted(more)
        assert set(before) <= set(self.left())

    @staticmethod
    def check(line: str, sentence: str) -> None:
        assert line.startswith("headsmith: error: ") and "Traceback" not in line
        assert re.search(sentence, line), line


def written(question: str, answer: str) -> str:
    turns = (("user", question), ("assistant", answer))
    return json.dumps({"messages": [{"role": r, "content": text} for r, text in turns]}) + "\n"


@pytest.fixture(scope="session")
def chat() -> Callable[[str, str], str]:
    """chat(question, answer): a conversation, as a line of a file."""
    return written


@pytest.fixture(scope="session")
def parts(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    root = tmp_path_factory.mktemp("parts")
    target, head = Target.load(tiny_target_dir), root / "head"
    Eagle3Head.for_target(target, torch.arange(target.vocab_size)).save(head)
    (head / "headsmith.json").write_text(json.dumps({"target": target_info(target)}))
    (root / "prompts.jsonl").write_text('{"prompt": "red"}\n')
    lines = [written(f"tea {i}", " ".join(WORDS[i % 3 : i % 3 + 3])) for i in range(8)]
    (root / "data.jsonl").write_text("".join(lines))
    return Parts(tiny_target_dir, head, root / "prompts.jsonl", root / "data.jsonl")


@pytest.fixture
def user(
    parts: Parts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> User:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("HEADSMITH_HOME", str(folder / "home"))
    return User(folder, parts, capsys)


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    """broken(folder, file, bytes kept): a copy of a folder with one of its files cut off."""

    def cut(folder: Path, name: str, kept: int) -> Path:
        copy = Path(shutil.copytree(folder, tmp_path / "broken", dirs_exist_ok=True))
        (copy / name).write_bytes((folder / name).read_bytes()[:kept])
        return copy

    return cut


@pytest.fixture
def poison(tmp_path: Path) -> Callable[..., Path]:
    """poison(folder, name, tensor, row): a copy, so called, with NaN in a row of one tensor."""

    def make(folder: Path, name: str, tensor: str, row: int) -> Path:
        copy = Path(shutil.copytree(folder, tmp_path / name))
        tensors = load_file(copy / "model.safetensors")
        tensors[tensor][row] = float("nan")
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return copy

    return make
