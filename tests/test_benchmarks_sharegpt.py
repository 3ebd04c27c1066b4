"""benchmarks/sharegpt_turns.py on records as the file has them, cut off at its end."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

LONG = "an answer that is long enough to be an answer"


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    """benchmarks/sharegpt_turns.py"""
    path = root / "benchmarks" / "sharegpt_turns.py"
    spec = importlib.util.spec_from_file_location("sharegpt_turns", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(name: str, *said: tuple[str, str]) -> dict[str, object]:
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in said]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    records = [
        record(
            "a",
            ("gpt", LONG),
            ("human", "What is a monad, please?"),
            ("gpt", LONG),
            ("human", "too short"),
            ("gpt", LONG),
            ("human", "And what is a functor then?"),
            ("gpt", "a short answer"),
        ),
        record("b", ("human", "what is a monad, please"), ("gpt", LONG)),
        record("c", ("human", "What is a monad please?!"), ("gpt", LONG + " again")),
        record("d", ("human", "Was heißt schön auf Englisch?" + "ö" * 5), ("gpt", LONG)),
        record("e", ("human", "How does a compiler work?"), ("system", "x"), ("gpt", LONG)),
        record("f", ("human", "How does a linker work here?"), ("gpt", LONG)),
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(records)[:-1] + ', {"id": "g", "conver')
    return path


def test_usable_turns_each_once(script: ModuleType, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(script.main, [str(source), "--out", str(out), "--held", "1"])
    assert result.exit_code == 0, result.output
    held, own = ((out / f"{name}.jsonl").read_text().splitlines() for name in ("held", "own"))
    rows = {row["id"]: row for row in map(json.loads, held + own)}
    # "b" differs from "a" in its first letter's case, so it is another question.
    assert set(rows) == {"a-1", "b-0", "f-0"} and len(held) == 1
    kept = json.loads(own[0])["messages"]
    assert [turn["role"] for turn in kept] == ["user", "assistant"]
    assert kept[1]["content"] == LONG


def test_held_and_own_depend_on_the_seed_alone(
    script: ModuleType, source: Path, tmp_path: Path
) -> None:
    found = []
    for seed in (0, 0, 1, 2, 3, 4):
        options = [str(source), "--out", str(tmp_path), "--held", "1", "--seed", str(seed)]
        assert CliRunner().invoke(script.main, options).exit_code == 0
        found.append((tmp_path / "held.jsonl").read_text())
    assert found[0] == found[1] and len(set(found)) > 1


def test_what_is_no_such_file(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"id": 1, "conversations": [{"from": "human"}, {"from": "gpt"}]}]')
    result = CliRunner().invoke(script.main, [str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1 and f"{path} has no conversations as ShareGPT's" in result.output
    assert not (tmp_path / "out").exists()


def test_questions_of_tokenised_rows_are_left_out(
    script: ModuleType, source: Path, tmp_path: Path, target_dir: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    chat = [{"role": "user", "content": "How does a linker work here?"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": ids}) + "\n")
    out = tmp_path / "out"
    options = [str(source), "--out", str(out), "--held", "0", "--without", str(rows)]
    result = CliRunner().invoke(script.main, options)
    assert result.exit_code == 0, result.output
    assert "f-0" not in (out / "own.jsonl").read_text()
