"""Every turn is asked again, every answer is kept, and nothing but answers becomes text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headsmith.data.chats import Chat, Chats
from headsmith.data.onpolicy.asking import Answer
from headsmith.data.onpolicy.dialogues import Dialogue, dialogues
from headsmith.data.onpolicy.journal import Journal, journal_of
from headsmith.data.onpolicy.run import Regenerated, regenerate
from headsmith.data.read import read_conversations
from headsmith.errors import HeadsmithError

Read = Callable[[Path], list[dict[str, Any]]]
SETTINGS = {"model": "echo", "seed": 0}


def run(chats: list[Dialogue], answerer: Any, out: Path, **more: Any) -> Regenerated:
    settings = more.pop("settings", SETTINGS)
    return regenerate(chats, lambda: answerer, out, settings, **more)


def test_every_turn_is_answered_behind_the_new_answers(
    chats: list[Dialogue], echo: Any, tmp_path: Path, read: Read
) -> None:
    out, steps = tmp_path / "out.jsonl", []
    result = run(chats, echo(), out, progress=lambda *step: steps.append(step))
    assert result == Regenerated(answered=4)
    assert steps == [(done, 6) for done in range(7)]
    a, b, c, d = read(out)
    assert [row["id"] for row in (a, b, c)] == ["a", "b", "c"] and d["id"] == chats[3].key
    assert [m["content"] for m in b["messages"]] == ["one two", "1 one two", "three", "3 three"]
    assert [m["role"] for m in c["messages"]] == "system user assistant user assistant".split()
    assert c["messages"][2]["content"] == "2 tea?" and c["messages"][4]["content"] == "4 milk?"
    assert "somebody else" not in out.read_text()
    assert a["status"] == "ok" and c["finish"] == ["ok", "ok"]
    # What it writes is what training reads.
    assert [c[-1]["content"] for c in read_conversations(out)] == [
        "1 red green",
        "3 three",
        "4 milk?",
        "1 blue",
    ]


@pytest.mark.parametrize("lives", range(6))
def test_a_run_that_stops_anywhere_goes_on(
    chats: list[Dialogue], echo: Any, tmp_path: Path, lives: int
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(chats, echo(), whole)
    with pytest.raises(KeyboardInterrupt):
        run(chats, echo(lives=lives), out)
    assert not out.exists() and journal_of(out).exists() == bool(lives)
    # And a kill in the middle of a line.
    if lives:
        with journal_of(out).open("ab") as file:
            file.write(b'{"key": "half of a li')
    again = echo()
    result = run(chats, again, out)
    assert len(again.asked) == 6 - lives
    assert result.kept + result.answered == 4 and out.read_bytes() == whole.read_bytes()
    third = echo()
    assert run(chats, third, out) == Regenerated(kept=4) and not third.asked


def test_the_answerer_is_not_made_when_there_is_nothing_to_ask(
    chats: list[Dialogue], echo: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run(chats, echo(), out)

    def never() -> Any:
        raise AssertionError

    assert regenerate(chats, never, out, SETTINGS).kept == 4


def test_more_conversations_ask_only_what_is_new(
    chats: list[Dialogue], echo: Any, tmp_path: Path, read: Read
) -> None:
    out, more = tmp_path / "out.jsonl", echo()
    run(chats[2:3], echo(), out)
    result = run(chats, more, out)
    assert (result.kept, result.answered) == (1, 3)
    assert len(more.asked) == 4 and [row["id"] for row in read(out)[:3]] == ["a", "b", "c"]


FATES = {
    "red green": Answer("refused", detail="content filter"),
    "three": Answer("error", detail="tried 7 times, then: status 500"),
    "tea?": Answer("length", "cut o"),
    "blue": Answer("empty"),
}


def test_what_is_no_answer_is_counted_and_never_text(
    chats: list[Dialogue], echo: Any, tmp_path: Path, read: Read
) -> None:
    out = tmp_path / "out.jsonl"
    result = run(chats, echo(FATES), out)
    assert result.left_out == {"refused": 1, "error": 1, "empty": 1}
    assert result.details["error"] == "tried 7 times, then: status 500"
    (row,) = read(out)
    assert (row["id"], row["status"], row["finish"]) == ("c", "length", ["length", "ok"])
    assert (result.answered, result.cut, result.partial) == (1, 1, 0)
    # Only what a server failed to answer is asked again.
    again = echo()
    result = run(chats, again, out)
    assert [ask.messages[-1]["content"] for ask in again.asked] == ["three"]
    assert result.left_out == {"refused": 1, "empty": 1} and result.answered == 1


def test_unfinished_and_cut_ones_by_choice(
    chats: list[Dialogue], echo: Any, tmp_path: Path, read: Read
) -> None:
    out = tmp_path / "out.jsonl"
    result = run(chats, echo(FATES), out, unfinished="keep", cut="drop")
    (row,) = read(out)
    assert (row["id"], row["status"], len(row["messages"])) == ("b", "partial", 2)
    assert result.partial == 1 and result.left_out == {"refused": 1, "cut": 1, "empty": 1}


def test_other_settings_are_refused_by_name(
    chats: list[Dialogue], echo: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run(chats, echo(), out)
    before = out.read_bytes()
    other = {"model": "echo", "seed": 1, "top-k": None}
    with pytest.raises(HeadsmithError, match=r"other settings \(seed was 0 and is 1\)"):
        run(chats, echo(), out, settings=other)
    assert out.read_bytes() == before


def test_files_of_something_else_are_left_alone(
    chats: list[Dialogue], echo: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(HeadsmithError, match="nothing tells what made it"):
        run(chats, echo(), out)
    assert out.read_text() == "mine\n" and not journal_of(out).exists()
    for text in ("not json\n{}\n", '{"no": "schema"}\n', "a note without an end", "[1]\n"):
        journal_of(out).write_text(text)
        with pytest.raises(HeadsmithError, match="line 1 was not written by regenerate"):
            run(chats, echo(), out)
        assert journal_of(out).read_text() == text
    with pytest.raises(HeadsmithError, match="is a folder; name a file"):
        run(chats, echo(), tmp_path)


def test_a_damaged_line_is_named(chats: list[Dialogue], echo: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(chats, echo(), out)
    lines = journal_of(out).read_text().splitlines(keepends=True)
    for bad in ("\x00\n", lines[1], '{"key": "x", "turn": 3, "status": "ok", "text": ""}\n'):
        journal_of(out).write_text("".join([*lines[:2], bad, *lines[2:]]))
        with pytest.raises(HeadsmithError, match=r"journal, line 3 was not written by regenerate"):
            run(chats, echo(), out)


def test_a_kill_in_the_first_line_loses_nothing(
    chats: list[Dialogue], echo: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    for torn in (b"", b"{", b'{"schema": "headsmith.ans'):
        journal_of(out).write_bytes(torn)
        out.unlink(missing_ok=True)
        assert run(chats, echo(), out).answered == 4


def test_two_runs_cannot_write_one_file(chats: list[Dialogue], echo: Any, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    out = tmp_path / "out.jsonl"
    with Journal(out, SETTINGS):
        with pytest.raises(HeadsmithError, match="another run is writing"):
            run(chats, echo(), out)
    assert run(chats, echo(), out).answered == 4


def test_keys_depend_on_what_is_said_and_on_nothing_else(chats: list[Dialogue]) -> None:
    def key(*contents: str, copies: int = 1, **more: Any) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
        rows = [Chat(messages, "file", 0, **more)] * copies
        return dialogues(rows)[-1].key

    assert key("q", "a") == key("q", "other", id="x") == key("q")
    assert len({key("q"), key("q", "a", "r"), key("r"), key("q", copies=2)}) == 4
    assert key("q", copies=2) == f"{key('q')}-2"
    assert len({one.key for one in chats}) == 4


def test_a_system_prompt_goes_where_there_is_none(source: str) -> None:
    parts = [one.parts[0] for one in dialogues(Chats([source]), "speak up")]
    assert [part[0]["content"] for part in parts] == ["speak up", "speak up", "be kind", "speak up"]
    assert len(dialogues(Chats([source]), limit=2)) == 2


def test_several_messages_before_an_answer_stay_together() -> None:
    roles = "user user assistant assistant system user system".split()
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    (one,) = dialogues([Chat(messages, "file", 0)])
    contents = [[message["content"] for message in part] for part in one.parts]
    assert contents == [["0", "1"], ["4", "5", "6"]]
    assert [m["content"] for m in one.history(["x"])] == ["0", "1", "x", "4", "5", "6"]
    assert [m["content"] for m in one.answered(["x"])] == ["0", "1", "x"]


def test_text_that_is_no_unicode_does_not_stop_a_run(
    chats: list[Dialogue], echo: Any, tmp_path: Path, read: Read
) -> None:
    out = tmp_path / "out.jsonl"
    run(chats[:1], echo({"red green": Answer("ok", "half \ud83d a pair")}), out)
    assert json.loads(out.read_bytes())["messages"][1]["content"] == "half ? a pair"
