"""Kinds 9, 11 and 12: keys, drafts and lengths that cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_9_unknown_key(user: Any) -> None:
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


def test_11_negative_depth(user: Any) -> None:
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
def test_12_a_context_too_long(user: Any, write: Callable[..., Path]) -> None:
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
    user.check(said[-1], sentence)
