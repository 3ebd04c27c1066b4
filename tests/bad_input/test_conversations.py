"""Kinds 5, 6 and 8: conversations that are empty, teach nothing or are cut off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_5_empty_data(user: Any, write: Callable[..., Path]) -> None:
    lines, array = write("lines.jsonl", "\n\n"), write("array.json", "[]")
    for source, sentence in (
        (write("nothing.jsonl", ""), "nothing.jsonl is empty; it should hold conversations as"),
        (lines, f"{lines} is empty; it should hold conversations as a JSON array, JSON Lines"),
        (array, f"{array} holds no conversation; give a source with conversations"),
    ):
        user.refused(user.prepare(source), sentence)
        user.refused(user.train(data=source), sentence)
    user.refused(user.eval(prompts=lines), f"prompts {lines} hold no row; write one JSON object")


def test_6_no_assistant_turns(user: Any, write: Callable[..., Path], tmp_path: Path) -> None:
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


def test_8_cut_off_conversations_are_used_up_to_the_cut(
    user: Any, write: Callable[..., Path]
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
