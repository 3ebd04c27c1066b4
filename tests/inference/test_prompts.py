"""Prompts: the three row layouts, tasks, templates, turns, and one sentence for each mistake."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.inference import prompts
from headsmith.inference.prompts import (
    Conversation,
    RequestBuilder,
    load_prompts,
    read_jsonl,
    template_sha256,
)


class FakeTokenizer:
    """One id a character after a BOS of 1, with a template that writes its own BOS (`^`)."""

    def __init__(self, chat_template: str | None = "plain") -> None:
        self.chat_template = chat_template

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt and not tokenize
        if self.chat_template == "no system" and messages[0]["role"] == "system":
            import jinja2

            raise jinja2.TemplateError("System role not supported")
        return "^" + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [1 if letter == "^" else ord(letter) for letter in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def text(self, ids: list[int]) -> str:
        return "".join("^" if one == 1 else chr(one) for one in ids)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_the_three_layouts_and_fastchat(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        [
            {"prompt": "one"},
            {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
            {
                "id": "m",
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": [{"type": "text", "text": "c"}]},
                    {"role": "assistant", "content": "dropped"},
                ],
            },
        ],
    )
    plain, fastchat, messages = load_prompts(str(path))
    assert plain == Conversation("0", "mine", ("one",))
    assert fastchat == Conversation("81", "mine", ("first", "second"))
    assert messages.turns == ("c",)
    assert [m["role"] for m in messages.context] == ["system", "user", "assistant"]


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"prompt": "x\u2028y"}\r\n\n{"prompt": "z"}', encoding="utf-8")
    assert [one.turns for one in read_jsonl(path)] == [("x\u2028y",), ("z",)]


def test_counts_commas_limit_and_row_tasks(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": f"a{i}"} for i in range(5)])
    write(tmp_path / "b.jsonl", [{"prompt": f"b{i}", "task": "maths"} for i in range(5)])
    both = load_prompts("a:2,b", data_dir=tmp_path)
    assert [one.task for one in both] == ["a"] * 2 + ["maths"] * 5
    assert len(load_prompts("a:2,b", data_dir=tmp_path, limit=3)) == 5
    assert len(load_prompts(f"{tmp_path}/a.jsonl:4")) == 4
    assert len(load_prompts("a:99", data_dir=tmp_path)) == 5


def test_a_path_may_hold_a_comma_and_a_colon(tmp_path: Path) -> None:
    path = write(tmp_path / "a,b:1", [{"prompt": "x"}, {"prompt": "y"}])
    assert len(load_prompts(str(path))) == 2


def test_repeated_ids_stay_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"}])
    ids = [one.id for one in read_jsonl(path)]
    assert len(set(ids)) == 2 and ids[0] == "1"


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "x"}])
    with pytest.raises(HeadsmithError, match="a task called a"):
        load_prompts(f"{path},{path}")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "x"', r"line 2 is not JSON"),
        ("[1]", r"line 2 is a list, not a JSON object"),
        ('{"text": "x"}', r"line 2 has none of `prompt`, `messages` and `turns`"),
        ('{"turns": []}', r"line 2 has no turn"),
        ('{"turns": ["a", ""]}', r"line 2 has a turn that is empty"),
        ('{"prompt": 3}', r"line 2 has no turn"),
        ('{"prompt": [3]}', r"line 2 has a turn that is empty or not a text"),
        ('{"messages": [{"role": "user"}]}', r"line 2 has a message that is not"),
        ('{"messages": "hello"}', r"line 2 has a message that is not"),
        ('{"prompt": "x", "given": 3}', r"line 2: `given` is neither a text nor a list of 1"),
        (
            '{"turns": ["x", "y"], "given": "z"}',
            r"line 2: `given` is neither a text nor a list of 2",
        ),
        ('{"turns": ["x", "y"], "given": ["z", 2]}', r"line 2 has a `given` that is not a text"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            r"line 2 has no message with the role `user`",
        ),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(HeadsmithError, match=sentence) as fault:
        read_jsonl(path)
    assert fault.value.exit_code == 2 and "\n" not in str(fault.value)


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="neither a file nor a task; tasks are default"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(HeadsmithError, match=r"there is no gsm8k.jsonl in"):
        load_prompts("gsm8k", data_dir=tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(HeadsmithError, match="hold no row"):
        load_prompts("empty", data_dir=tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HeadsmithError, match="cannot be read"):
        load_prompts("binary", data_dir=tmp_path)


@pytest.mark.parametrize("source", ["a:0", "a:-3"])
def test_counts_below_one_are_refused(tmp_path: Path, source: str) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "x"}])
    with pytest.raises(HeadsmithError, match="must be 1 or more"):
        load_prompts(source, data_dir=tmp_path)
    with pytest.raises(HeadsmithError, match="must be 1 or more"):
        load_prompts("a", data_dir=tmp_path, limit=0)


def test_hub_tasks_are_mapped_and_a_failing_network_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub: dict[str, list[dict[str, Any]]] = {
        "HuggingFaceH4/mt_bench_prompts": [{"prompt_id": 81, "prompt": ["one", "two"]}],
        "openai/openai_humaneval": [{"task_id": "HumanEval/0", "prompt": "def f():"}],
        "openai/gsm8k": [{"question": "1 + 1?", "answer": "2"}],
    }

    class Datasets:
        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
            return hub[name]

    real = builtins.__import__

    def fake_import(name: str, *args: Any, **kwargs: Any) -> Any:
        return Datasets if name == "datasets" else real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake_import)
    bench, code, maths = load_prompts("mt_bench,humaneval,gsm8k")
    assert bench == Conversation("81", "mt_bench", ("one", "two"))
    assert (code.id, code.turns[0][-8:]) == ("HumanEval/0", "def f():")
    assert maths.turns == ("1 + 1?",)
    hub.clear()
    with pytest.raises(EnvironmentFault, match="--data-dir DIR with gsm8k.jsonl") as fault:
        load_prompts("gsm8k")
    assert fault.value.exit_code == 4


def test_local_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_from_hub", lambda name: pytest.fail("the network was used"))
    write(tmp_path / "gsm8k.jsonl", [{"prompt": "x"}])
    assert load_prompts("gsm8k:1", data_dir=tmp_path)[0].task == "gsm8k"


def test_template_writes_the_only_bos() -> None:
    tokenizer = FakeTokenizer()
    request = RequestBuilder(tokenizer, 100).build(Conversation("7", "chat", ("hi",)))
    assert tokenizer.text(request.prompt_ids) == "^<user>hi<assistant>"
    assert (request.id, request.task, request.turn) == ("7", "chat", 0)
    assert request.conversation == "7"


def test_second_turn_holds_the_answer_to_the_first() -> None:
    tokenizer = FakeTokenizer()
    builder = RequestBuilder(tokenizer, 200, system_prompt="be kind")
    talk = Conversation("7", "chat", ("hi", "more"))
    first, second = builder.build(talk), builder.build(talk, 1, ["hello"])
    assert tokenizer.text(first.prompt_ids) == "^<system>be kind<user>hi<assistant>"
    assert tokenizer.text(second.prompt_ids) == (
        "^<system>be kind<user>hi<assistant>hello<user>more<assistant>"
    )
    assert (first.id, second.id, second.turn) == ("7#1", "7#2", 1)
    assert first.conversation == second.conversation == "7"


def test_a_row_keeps_its_own_system_message() -> None:
    tokenizer = FakeTokenizer()
    row = Conversation("1", "t", ("hi",), ({"role": "system", "content": "mine"},))
    request = RequestBuilder(tokenizer, 100, system_prompt="other").build(row)
    assert tokenizer.text(request.prompt_ids) == "^<system>mine<user>hi<assistant>"


def test_without_a_template_the_raw_text_is_used_and_said_once() -> None:
    tokenizer = FakeTokenizer(None)
    builder = RequestBuilder(tokenizer, 100)
    for _ in range(2):
        request = builder.build(Conversation("1", "t", ("hi",)))
    assert tokenizer.text(request.prompt_ids) == "^hi"
    assert len(builder.warnings) == 1 and "no chat template" in builder.warnings[0]
    assert template_sha256(tokenizer) is None
    named = template_sha256(FakeTokenizer("x"))
    assert named is not None and len(named) == 64


def test_template_that_refuses_a_system_prompt() -> None:
    builder = RequestBuilder(FakeTokenizer("no system"), 100, system_prompt="s")
    with pytest.raises(HeadsmithError, match="refuses prompt 3: System role not supported"):
        builder.build(Conversation("3", "t", ("hi",)))


def test_prompt_too_long_names_its_id_and_lengths() -> None:
    length = len("^<user>hi<assistant>")
    talk = Conversation("9", "chat", ("hi",))
    assert RequestBuilder(FakeTokenizer(), length + 1).build(talk).prompt_ids
    with pytest.raises(HeadsmithError, match=f"prompt 9 of chat is {length} tokens long") as fault:
        RequestBuilder(FakeTokenizer(), length).build(talk)
    assert f"holds {length}," in str(fault.value) and fault.value.exit_code == 2


def test_texts_that_the_answers_are_expected_to_follow(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """One a turn, in tokens of their own: nothing is put before or behind them."""
    path = tmp_path / "edits.jsonl"
    rows = [{"turns": ["x", "y"], "given": ["ab", ""]}, {"prompt": "x", "given": "c d"}]
    rows.append({"prompt": "x"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    builder = RequestBuilder(tiny_tokenizer, 512)
    two, one, none = read_jsonl(path)
    built = [builder.build(two), builder.build(two, 1, ["answer"]), builder.build(one)]
    texts = [tiny_tokenizer.decode(request.given_ids or []) for request in built]
    assert texts == ["ab", "", "c d"] and builder.build(none).given_ids is None
