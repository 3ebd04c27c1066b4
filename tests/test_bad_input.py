"""Twelve kinds of bad input, typed as a user would: one sentence, its exit code, nothing left."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headsmith.cli import cli, run
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.provenance import target_info
from headsmith.models.target import Target

FULL = OSError(errno.ENOSPC, "No space left on device")
WEIGHTS, CONFIG = "model.safetensors", "config.json"
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

    def refused(self, args: list[object], sentence: str, code: int = 2) -> None:
        """The command ends with this one sentence and code, and leaves nothing behind."""
        before = self.left()
        found, said = self.type(*args)
        assert len(said) == 1, said
        check_sentence(said[0], sentence)
        assert found == code
        assert self.left() == before


def check_sentence(line: str, sentence: str) -> None:
    assert line.startswith("headsmith: error: ") and "Traceback" not in line
    assert re.search(sentence, line), line


@pytest.fixture(scope="module")
def parts(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    root = tmp_path_factory.mktemp("parts")
    target, head = Target.load(tiny_target_dir), root / "head"
    Eagle3Head.for_target(target, torch.arange(target.vocab_size)).save(head)
    (head / "headsmith.json").write_text(json.dumps({"target": target_info(target)}))
    (root / "prompts.jsonl").write_text('{"prompt": "red"}\n')
    rows = [chat(f"tea {i}", " ".join(WORDS[i % 3 : i % 3 + 3])) for i in range(8)]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    """broken(folder, file, bytes kept): a copy of a folder with one of its files cut off."""

    def cut(folder: Path, name: str, kept: int) -> Path:
        copy = Path(shutil.copytree(folder, tmp_path / "broken", dirs_exist_ok=True))
        (copy / name).write_bytes((folder / name).read_bytes()[:kept])
        return copy

    return cut


def chat(question: str, answer: str) -> dict[str, Any]:
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def poison(folder: Path, copy: Path, name: str, row: int) -> Path:
    """A copy of a checkpoint with NaN in a row of one tensor."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / WEIGHTS)
    tensors[name][row] = float("nan")
    save_file(tensors, copy / WEIGHTS, {"format": "pt"})
    return copy


@pytest.mark.slow
def test_the_good_parts_are_accepted(user: User) -> None:
    assert user.type(*user.eval())[0] == 0
    assert user.type(*user.prepare(user.parts.data))[0] == 0


def test_1_wrong_path(user: User, tmp_path: Path) -> None:
    no, taken = tmp_path / "no", user.parts.prompts
    user.refused(user.eval(target=no), f"target {no} does not exist; give a folder")
    user.refused(user.eval(target="models/no"), "models/no is no folder here.*check the path")
    user.refused(user.eval(head=no), f"no head in {no}: not a folder")
    user.refused(user.eval(prompts=no), f"prompts '{no}' are neither a file nor a task; tasks are")
    user.refused(user.eval(out=taken), f"out is {taken}, which is a file; name a folder")
    user.refused(user.train(target=no), f"target {no} does not exist; give a folder")
    user.refused(user.train(data=no), f"no file, folder or Hub data set called {no}; check")
    user.refused(["train", no], f"no recipe '{no}': give a YAML file or a packaged name")
    user.refused(user.prepare(no), f"no file, folder or Hub data set called {no}; check")
    user.refused(user.prepare(user.parts.data, no), f"target {no} does not exist; give a folder")
    user.refused(
        [*user.prepare(user.parts.data)[:-1], taken], f"{taken} cannot be a folder.*choose"
    )


def test_2_not_a_model(user: User, tmp_path: Path, write: Callable[..., Path]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    text, gguf = write("model.txt", "hello"), write("model.gguf", "hello")
    for args in (user.eval, user.train):
        user.refused(args(target=empty), f"{empty} holds no config.json: .*; check the path")
        user.refused(args(target=text), f"{text} is a file but no GGUF; give a model's folder")
        user.refused(args(target=gguf), f"{gguf} could not be loaded as GGUF.*; give a GGUF")
        user.refused(args(target=user.parts.head), "head holds no tokenizer.*; give a model's")
    user.refused(user.prepare(user.parts.data, empty), f"{empty} holds no tokenizer.*; give a")
    user.refused(user.prepare(user.parts.data, text), f"{text} is a file but no GGUF; give a")
    user.refused(user.eval(head=empty), f"{empty} is not a head: there is no config.json in it")
    user.refused(user.eval(head=user.parts.target), "a head of 8 layers is not supported; only one")


@pytest.mark.slow
def test_3_tokenizer_of_another_model(user: User, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(user.parts.target, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "</s>"))
    sentence = f"not {other}: another tokenizer or chat template; give its own target, or --allow-"
    user.refused(user.eval(target=other), sentence)
    assert user.type(*user.eval("--allow-mismatch", target=other))[0] == 0


def test_4_head_of_another_width(user: User, tmp_path: Path) -> None:
    head = tmp_path / "narrow"
    shutil.copytree(user.parts.head, head)
    config = json.loads((head / CONFIG).read_text())
    (head / CONFIG).write_text(json.dumps(config | {"hidden_size": 32}))
    sentence = "narrow reads states of width 32, the target .* has 64; it was trained for another"
    user.refused(user.eval(head=head), sentence)
    user.refused(user.eval("--allow-mismatch", head=head), sentence)


@pytest.mark.slow
def test_5_empty_data(user: User, write: Callable[..., Path]) -> None:
    lines, array = write("lines.jsonl", "\n\n"), write("array.json", "[]")
    for source, sentence in (
        (write("nothing.jsonl", ""), "nothing.jsonl is empty; it should hold conversations as"),
        (lines, f"{lines} is empty; it should hold conversations as a JSON array, JSON Lines"),
        (array, f"{array} holds no conversation; give a source with conversations"),
    ):
        user.refused(user.prepare(source), sentence)
        user.refused(user.train(data=source), sentence)
    user.refused(user.eval(prompts=lines), f"prompts {lines} hold no row; write one JSON object")


def test_6_no_assistant_turns(user: User, write: Callable[..., Path], tmp_path: Path) -> None:
    questions = write("q.jsonl", '{"messages": [{"role": "user", "content": "red"}]}\n' * 3)
    sentence = f"no assistant token to train on in {questions}: of 3 rows: 3 no assistant message"
    sentence += "; the roles seen are user; look at it with `headsmith data inspect`"
    user.refused(user.prepare(questions), sentence)
    user.refused(user.train(data=questions), sentence)
    mute = tmp_path / "mute"
    shutil.copytree(user.parts.target, mute)
    (mute / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    sentence = "no assistant token to train on in .*: 8 no assistant token; the roles seen"
    user.refused(user.prepare(user.parts.data, mute), sentence)


def test_7_nan(user: User, tmp_path: Path, write: Callable[..., Path]) -> None:
    target, head = user.parts.target, user.parts.head
    everywhere = poison(target, tmp_path / "a", "model.layers.3.mlp.up_proj.weight", 0)
    sentence = f"{everywhere}: the target's states hold NaN or infinity; try float32, or get its"
    user.refused(user.train(target=everywhere), sentence)
    user.refused(user.eval(target=everywhere), sentence)
    bad = poison(head, tmp_path / "h", "fc.weight", 0)
    user.refused(user.eval(head=bad), f"head {bad}: fc.weight holds NaN .*; the run that wrote it")


def test_7_nan_for_one_token_only(
    user: User, tmp_path: Path, write: Callable[..., Path], tiny_tokenizer: Any
) -> None:
    (row,) = tiny_tokenizer("w")["input_ids"]
    target = poison(user.parts.target, tmp_path / "w", "model.embed_tokens.weight", row)
    args = user.eval(
        *("--allow-mismatch", "--out", user.folder / "out"),
        target=target,
        prompts=write("w.jsonl", '{"prompt": "w"}\n'),
    )
    user.refused(args, "logits of the target .* for prompt 0 hold NaN or infinity; try float32")
    rows = [chat("we", f"wow {word}") for word in WORDS]
    data = write("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    code, said = user.type(*user.train(target=target, data=data))
    assert code == 2
    check_sentence(
        said[-1], r"states of packed row \d+ \(conversations .*\) hold NaN.*; try target"
    )
    # The run is there to be continued, with no step in it.
    assert (user.folder / "out" / "metrics.jsonl").read_text() == ""
    assert not [name for name in user.left() if ".tmp" in name or "step-" in name]


@pytest.mark.parametrize("kept", [5, 3000, 100_000])
def test_8_cut_off_weights(user: User, broken: Callable[..., Path], kept: int) -> None:
    target = broken(user.parts.target, WEIGHTS, kept)
    sentence = f"weights of target {target} could not be loaded .*; they are cut off or damaged"
    user.refused(user.eval(target=target), sentence)
    user.refused(user.train(target=target), sentence)
    shutil.rmtree(target)
    head = broken(user.parts.head, WEIGHTS, kept)
    user.refused(user.eval(head=head), f"{head / WEIGHTS} cannot be read .*; it is missing or cut")


def test_8_cut_off_json(user: User, broken: Callable[..., Path]) -> None:
    target = broken(user.parts.target, CONFIG, 100)
    for args in (user.eval(target=target), user.train(target=target)):
        user.refused(args, f"{target / CONFIG} could not be loaded .*; it may be cut off, so get")
    broken(user.parts.target, "tokenizer.json", 100)
    shutil.copy(user.parts.target / CONFIG, target)
    sentence = f"tokenizer of {target} could not be loaded .*; its files are cut off"
    user.refused(user.eval(target=target), sentence)
    user.refused(user.prepare(user.parts.data, target), sentence)
    shutil.rmtree(target)
    for name in (CONFIG, "headsmith.json"):
        head = broken(user.parts.head, name, 60)
        user.refused(user.eval(head=head), f"{head / name} is not valid JSON .*; it may be cut")
        shutil.rmtree(head)


def test_8_cut_off_conversations_are_used_up_to_the_cut(
    user: User, write: Callable[..., Path]
) -> None:
    rows = [json.loads(line) for line in user.parts.data.read_text().splitlines()]
    path = write("cut.json", json.dumps(rows)[:-20])
    code, said = user.type(*user.prepare(path))
    size, last = path.stat().st_size, path.read_text().rindex('{"messages"')
    warnings = [line for line in said if "cut off" in line]
    assert code == 0 and len(warnings) == 1
    assert f"ends at byte {size} inside the record that begins at byte {last}" in warnings[0]
    assert "the 7 records before are read" in warnings[0]
    cut = write("cut.jsonl", '{"prompt": "red"}\n{"prom')
    user.refused(user.eval(prompts=cut), f"{cut}, line 2 is not JSON .*; a prompts file has one")


def test_9_unknown_key(user: User) -> None:
    recipe = user.train()[1]
    assert isinstance(recipe, Path)
    text = recipe.read_text()
    recipe.write_text(text.replace("unroll_steps", "unrol_steps"))
    sentence = f"{recipe}: unknown key train.unrol_steps; did you mean train.unroll_steps?"
    user.refused(["train", recipe], re.escape(sentence))
    recipe.write_text(text)
    for override, words in (
        ("train.learning_rat=1", r"command line: unknown key train\.learning_rat; did you mean tr"),
        ("optimizer.lr=1", "command line: unknown key optimizer; the nearest key is "),
        ("rubbish", "override 'rubbish' is not of the form key.sub=value"),
    ):
        user.refused(["train", recipe, override], words)
    user.refused(["train", recipe, "--plann"], "no such option.*--plan'.*; see headsmith train --h")
    user.refused(user.eval("--drafts=x"), "no such option '--drafts'.*--draft'.*; see headsmith ev")
    user.refused(user.eval("--limit=x"), "invalid value for '--limit'.*; see headsmith eval --help")
    user.refused(["evl"], "no such command 'evl'.*; see headsmith --help")
    user.refused(
        ["data", "prepare"], "missing argument 'SOURCE'; see headsmith data prepare --help"
    )


def raise_full(*args: object, **kwargs: object) -> None:
    raise FULL


@pytest.mark.slow
def test_10_disk_full_at_a_checkpoint(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = torch.save, []

    def second_fails(*args: Any, **kwargs: Any) -> None:
        saved.append(args[1])
        save(*args, **kwargs)
        if len(saved) == 2:
            raise RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed")

    monkeypatch.setattr(torch, "save", second_fails)
    code, said = user.type(*user.train())
    assert code == 4 and len(saved) == 2
    errors = [line for line in said if line.startswith("headsmith: error")]
    assert errors == said[-1:]
    out = user.folder / "out"
    check_sentence(said[-1], f"disk is full while writing {out / 'step-000002'}; free some space")
    assert (out / "latest").resolve().name == "step-000001"
    assert not [name for name in user.left() if ".tmp" in name or "step-000002" in name]
    # With space again the same command goes on.
    monkeypatch.undo()
    monkeypatch.setenv("HEADSMITH_HOME", str(user.folder / "home"))
    code, said = user.type(*user.train())
    assert code == 0 and any("after step 1" in line for line in said)
    assert (out / "latest").resolve().name == "step-000002"


@pytest.mark.slow
def test_10_disk_full_at_a_result(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    out = user.folder / "deep" / "out"
    monkeypatch.setattr("headsmith.inference.result.write_json", raise_full)
    sentence = f"disk is full while writing {out}; free some space and run again"
    user.refused(user.eval(out=out), sentence, code=4)
    out.mkdir(parents=True)
    (out / "result.json").write_text("an earlier one")
    user.refused(user.eval(out=out), sentence, code=4)
    assert (out / "result.json").read_text() == "an earlier one"


def test_10_disk_full_at_the_data(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.Dataset.save_to_disk", raise_full)
    sentence = f"disk is full while writing {user.folder / 'prepared'}/data-.*; free some space"
    user.refused(user.prepare(user.parts.data), sentence, code=4)
    user.refused(user.train(), sentence, code=4)


def test_11_negative_depth(user: User) -> None:
    for draft, words in (
        ("chain:-1", "draft chain:-1: depth is -1; it must be at least 1"),
        ("chain:0", "draft chain:0: depth is 0; it must be at least 1"),
        ("tree:0,4,4", "draft tree:0,4,4: nodes is 0; it must be at least 1"),
        ("tree:4,4,-2", "draft tree:4,4,-2: depth is -2; it must be at least 1"),
    ):
        user.refused(user.eval("--draft", draft), words)
        user.refused(user.train(f"validation.draft={draft}"), f"validation.draft: {words}")
    user.refused(user.train("validation.draft=chain:-1", "--plan"), "validation.draft: draft chain")
    user.refused(user.eval("--draft=chain:600"), "chain:600 goes 600 .* context holds 512; draft l")


@pytest.mark.slow
def test_12_a_context_too_long(user: User, write: Callable[..., Path]) -> None:
    long = write("long.jsonl", json.dumps({"prompt": "red " * 150}) + "\n")
    sentence = (
        r"prompt 0 of long is 6\d\d tokens long and the target's context holds 512.*; shorten"
    )
    user.refused(user.eval("--out", user.folder / "out", prompts=long), sentence)
    user.refused(user.eval("--max-new-tokens=0"), "max-new-tokens is 0; it must be 1 or more")
    user.refused(
        user.train("validation.max_new_tokens=0"),
        "command line: validation.max_new_tokens is 0, but must be greater than or equal to 1",
    )
    code, said = user.type(*user.train(f"validation.prompts={long}"))
    assert code == 2 and not (user.folder / "out").exists()
    check_sentence(said[-1], sentence)
