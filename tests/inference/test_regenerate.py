"""On-policy answers: two turns, resuming after a kill, empty answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference import regenerate as module
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request
from headsmith.inference.regenerate import regenerate
from headsmith.models.target import Target

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "red green"},
    {"id": "b", "turns": ["one two", "three"]},
    {
        "id": "c",
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "tea?"},
        ],
    },
    {"id": "d", "prompt": "blue"},
]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(tiny_target_dir)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def answer(target: Target, prompts: str, out: Path, **more: Any) -> dict[str, int]:
    return regenerate(target, prompts, out, max_new_tokens=5, batch=3, **more)


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def whole(target: Target, prompts: str, tmp_path: Path) -> Path:
    """The answers of a run that nobody disturbed."""
    out = tmp_path / "whole" / "answers.jsonl"
    assert answer(target, prompts, out) == {"kept": 0, "answered": 4, "empty": 0, "too long": 0}
    return out


def test_lines_hold_the_targets_own_answers(target: Target, whole: Path) -> None:
    lines = read(whole)
    assert list(lines) == ["a", "b", "c", "d"]
    assert [m["role"] for m in lines["b"]["messages"]] == ["user", "assistant"] * 2
    assert [m["role"] for m in lines["c"]["messages"]] == ["system", "user", "assistant"]
    assert len(lines["b"]["finish"]) == 2
    assert not list(whole.parent.glob(".*"))
    # The second answer of b is what plain decoding says behind the first.
    messages = lines["b"]["messages"]
    text = target.tokenizer.apply_chat_template(
        messages[:3], tokenize=False, add_generation_prompt=True
    )
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    ((response,), _) = Decoder(target, max_new_tokens=5).generate([Request("b", "t", ids)])
    said = target.tokenizer.decode(response.output_ids, skip_special_tokens=True).strip()
    assert said == messages[3]["content"]
    assert response.finish_reason == lines["b"]["finish"][1]


def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the ids of the requests that are decoded from here on."""
    seen: list[str] = []
    generate = Decoder.generate

    def watch(self: Decoder, requests: list[Request], *rest: Any) -> Any:
        seen.extend(r.conversation for r in requests)
        return generate(self, requests, *rest)

    monkeypatch.setattr(Decoder, "generate", watch)
    return seen


def test_a_second_run_answers_nothing_again(
    target: Target, prompts: str, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = whole.read_bytes(), asked(monkeypatch)
    assert answer(target, prompts, whole) == {"kept": 4, "answered": 0, "empty": 0, "too long": 0}
    assert seen == [] and whole.read_bytes() == before


def test_a_killed_run_goes_on_where_it_was(
    target: Target,
    prompts: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last line was cut off; and the run that goes on is killed once more."""
    lines = whole.read_text().splitlines(keepends=True)
    out = tmp_path / "killed.jsonl"
    partial = tmp_path / ".killed.jsonl.partial"
    partial.write_text(lines[1] + lines[0][:20])
    line_of = module._line
    calls: list[str] = []

    def die_at_the_second(conversation: Any, *rest: Any) -> Any:
        calls.append(conversation.id)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return line_of(conversation, *rest)

    monkeypatch.setattr(module, "_line", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        answer(target, prompts, out)
    assert not out.exists() and set(read(partial)) == {"b", calls[0]}
    seen = asked(monkeypatch)
    counts = answer(target, prompts, out)
    assert counts == {"kept": 2, "answered": 2, "empty": 0, "too long": 0}
    assert sorted(seen) == sorted({"a", "b", "c", "d"} - {"b", calls[0]})
    assert out.read_text() == whole.read_text() and not partial.exists()


def test_a_file_of_something_else_is_left_alone(
    target: Target, prompts: str, tmp_path: Path
) -> None:
    out = tmp_path / "notes.jsonl"
    for text in ("not json\n{}\n", '{"no id": 1}\n\n'):
        out.write_text(text)
        with pytest.raises(HeadsmithError, match="line 1 was not written by regenerate"):
            answer(target, prompts, out)
        assert out.read_text() == text


def test_an_empty_answer_ends_its_conversation(
    target: Target, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(target.tokenizer), "decode", lambda *a, **k: " \n")
    seen = asked(monkeypatch)
    out = tmp_path / "empty.jsonl"
    assert answer(target, prompts, out) == {"kept": 0, "answered": 0, "empty": 4, "too long": 0}
    assert sorted(seen) == ["a", "b", "c", "d"] and out.read_text() == ""


@pytest.mark.parametrize("turns", [["word " * 600], ["one", "word " * 600]])
def test_a_turn_that_does_not_fit_costs_only_its_conversation(
    target: Target, tmp_path: Path, turns: list[str]
) -> None:
    prompts, out = tmp_path / "long.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": "long", "turns": turns}, {"id": "short", "prompt": "tea?"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = answer(target, str(prompts), out)
    assert counts == {"kept": 0, "answered": 1, "empty": 0, "too long": 1}
    assert list(read(out)) == ["short"]


def test_progress_and_limit(target: Target, prompts: str, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    counts = answer(
        target, prompts, tmp_path / "o.jsonl", limit=2, progress=lambda *s: steps.append(s)
    )
    assert counts == {"kept": 0, "answered": 2, "empty": 0, "too long": 0}
    assert steps == [(1, 2), (2, 2)]


def test_ids_must_be_distinct(target: Target, prompts: str, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": "a", "prompt": "sun"}) + "\n")
    with pytest.raises(HeadsmithError, match="two conversations are called a"):
        answer(target, f"{prompts},{other}", tmp_path / "o.jsonl")
