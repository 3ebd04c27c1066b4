"""Kinds 1 to 4, 7 and 8: paths, targets and heads that are wrong, foreign, poisoned or cut off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.mark.slow
def test_the_good_parts_are_accepted(user: Any) -> None:
    assert user.type(*user.eval())[0] == 0
    assert user.type(*user.prepare(user.parts.data))[0] == 0


def test_1_wrong_path(user: Any, tmp_path: Path) -> None:
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


def test_2_not_a_model(user: Any, tmp_path: Path, write: Callable[..., Path]) -> None:
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
def test_3_tokenizer_of_another_model(user: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(user.parts.target, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "</s>"))
    sentence = f"not {other}: another chat template; give its own target, or --allow-"
    user.refused(user.eval(target=other), sentence)
    assert user.type(*user.eval("--allow-mismatch", target=other))[0] == 0


def test_4_head_of_another_width(user: Any, tmp_path: Path) -> None:
    head = tmp_path / "narrow"
    shutil.copytree(user.parts.head, head)
    config = json.loads((head / CONFIG).read_text())
    (head / CONFIG).write_text(json.dumps(config | {"hidden_size": 32}))
    sentence = "narrow reads states of width 32, the target .* has 64; it was trained for another"
    user.refused(user.eval(head=head), sentence)
    user.refused(user.eval("--allow-mismatch", head=head), sentence)


def test_7_nan(user: Any, poison: Callable[..., Path]) -> None:
    target, head = user.parts.target, user.parts.head
    everywhere = poison(target, "a", "model.layers.3.mlp.up_proj.weight", 0)
    sentence = f"{everywhere}: the target's states hold NaN or infinity; try float32, or get its"
    user.refused(user.train(target=everywhere), sentence)
    user.refused(user.eval(target=everywhere), sentence)
    bad = poison(head, "h", "fc.weight", 0)
    user.refused(user.eval(head=bad), f"head {bad}: fc.weight holds NaN .*; the run that wrote it")


def test_7_nan_for_one_token_only(
    user: Any,
    write: Callable[..., Path],
    poison: Callable[..., Path],
    chat: Callable[[str, str], str],
    tiny_tokenizer: Any,
) -> None:
    (row,) = tiny_tokenizer("w")["input_ids"]
    target = poison(user.parts.target, "w", "model.embed_tokens.weight", row)
    args = user.eval(
        *("--allow-mismatch", "--out", user.folder / "out"),
        target=target,
        prompts=write("w.jsonl", '{"prompt": "w"}\n'),
    )
    user.refused(args, "logits of the target .* for prompt 0 hold NaN or infinity; try float32")
    words = ("one", "tea", "sun", "red", "blue", "milk")
    data = write("data.jsonl", "".join(chat("we", f"wow {word}") for word in words))
    code, said = user.type(*user.train(target=target, data=data))
    assert code == 2
    user.check(said[-1], r"states of packed row \d+ \(conversations .*\) hold NaN.*; try target")
    # The run is there to be continued, with no step in it.
    assert (user.folder / "out" / "metrics.jsonl").read_text() == ""
    assert not [name for name in user.left() if ".tmp" in name or "step-" in name]


@pytest.mark.parametrize("kept", [5, 3000, 100_000])
def test_8_cut_off_weights(user: Any, broken: Callable[..., Path], kept: int) -> None:
    target = broken(user.parts.target, WEIGHTS, kept)
    sentence = f"weights of target {target} could not be loaded .*; they are cut off or damaged"
    user.refused(user.eval(target=target), sentence)
    user.refused(user.train(target=target), sentence)
    shutil.rmtree(target)
    head = broken(user.parts.head, WEIGHTS, kept)
    user.refused(user.eval(head=head), f"{head / WEIGHTS} cannot be read .*; it is missing or cut")


def test_8_cut_off_json(user: Any, broken: Callable[..., Path]) -> None:
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
