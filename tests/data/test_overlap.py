"""Rows that hold evaluation prompts: found in any message, shown, left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headsmith.cli import cli, run
from headsmith.data.chats import shipped_prompts
from headsmith.data.overlap import overlap
from headsmith.errors import HeadsmithError

PROMPT = "How many violins would it take to fill a bathtub with sound?"
TWO = {"turns": ["Name four rivers", PROMPT]}
CLEAN = "How many violins does a good orchestra have, and who tunes them?"


@pytest.fixture
def files(write: Callable[[str, str], Path]) -> Callable[..., str]:
    """files(name, row, ...): rows are objects, or texts that a user asks and nobody answers."""

    def make(name: str, *rows: object) -> str:
        known = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
        lines = [json.dumps({"id": i, **row}) + "\n" for i, row in enumerate(known)]
        return str(write(f"{name}.jsonl", "".join(lines)))

    return make


@pytest.fixture
def found(files: Callable[..., str], tmp_path: Path) -> Callable[..., list[str]]:
    """found(row, ..., against=[...], **options): ids of the rows that overlap."""

    def search(*rows: object, against: list[object], **options: int) -> list[str]:
        source, out = files("rows", *rows), tmp_path / "clean.jsonl"
        result = overlap([source], [files("prompts", *against)], out, **options)
        clean = [json.loads(line)["id"] for line in out.read_text().splitlines()]
        assert result.read == len(rows) and result.overlapping == len(rows) - len(clean)
        return sorted({str(i) for i in range(len(rows))} - set(clean))

    return search


def test_a_prompt_is_found_anywhere(found: Callable[..., list[str]]) -> None:
    def row(*contents: str) -> dict[str, object]:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}

    rows = [
        PROMPT,
        CLEAN,
        row("Tell me: " + PROMPT.upper().replace(" ", "\n"), "no"),
        row("hello", "You asked how many violins would it take to fill a bath, did you not?"),
        row("How many violins would it take", "to fill a bathtub with sound?"),
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": PROMPT}]},
    ]
    # Words on both sides of two messages do not stand in a row.
    assert found(*rows, against=[PROMPT]) == ["0", "2", "3", "5"]
    assert found(*rows, against=[TWO]) == ["0", "2", "3", "5"]
    assert found(*rows, against=[PROMPT], ngram=12) == ["0", "2", "5"]
    assert found(*rows, against=[PROMPT], ngram=5) == ["0", "2", "3", "4", "5"]


def test_a_short_prompt_must_be_there_whole(found: Callable[..., list[str]]) -> None:
    rows = ["Please name four large rivers.", "Name four rivers", "name four large lakes"]
    assert found(*rows, against=["Name four large rivers"]) == ["0"]
    # Three words are no evidence.
    assert found(*rows, against=["Name four rivers"]) == []


def test_the_report_names_both_sides(files: Callable[..., str]) -> None:
    rows, prompts = files("rows", CLEAN, PROMPT, PROMPT), files("prompts", "hi", PROMPT)
    result = overlap([rows], [prompts])
    assert (result.prompts, result.too_short, result.by_prompts) == (2, 1, {prompts: 2})
    assert result.by_prompt == {f"1 of {prompts}": 2}
    example = result.examples[0]
    assert (example.row, example.prompt) == (f"1 of {rows}", f"1 of {prompts}")
    assert example.shared == "how many violins would it take to fill"


def test_the_shipped_prompts_are_looked_for(
    files: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = json.loads(shipped_prompts().read_text(encoding="utf-8").splitlines()[0])
    rows = files("rows", CLEAN, f"Well, {shipped['turns'][0]}", PROMPT)
    out = tmp_path / "clean.jsonl"
    assert run(cli, ["data", "overlap", rows]) == 0
    assert "1 of 3 rows overlap one of 60 prompts\n" in capsys.readouterr().err
    more = ["--against", files("prompts", TWO), "--out", str(out)]
    assert run(cli, ["data", "overlap", rows, *more]) == 0
    said = capsys.readouterr().err
    assert f"2 of 3 rows overlap one of 61 prompts; the other 1 are in {out}" in said
    assert "prompts of default: 1 rows" in said and "1 of " in said
    (line,) = out.read_text().splitlines()
    assert json.loads(line) == {"id": "0", "source": rows, "turns": [CLEAN]}


def test_what_cannot_be(files: Callable[..., str], tmp_path: Path) -> None:
    rows, prompts = files("rows", CLEAN), files("prompts", PROMPT)
    with pytest.raises(HeadsmithError, match="ngram is 3; fewer than 4 words"):
        overlap([rows], [prompts], ngram=3)
    with pytest.raises(HeadsmithError, match="is also read"):
        overlap([rows], [prompts], Path(prompts))
    with pytest.raises(HeadsmithError, match="check the path"):
        overlap([rows], [str(tmp_path / "none.jsonl")])
