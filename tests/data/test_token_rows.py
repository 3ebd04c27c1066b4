"""Rows that are tokenised already: taken as they are, or left out with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from rich.console import Console

from headsmith.data.mask import encode
from headsmith.data.prepare import prepare
from headsmith.data.read import read_conversations
from headsmith.data.show import inspect
from headsmith.errors import HeadsmithError


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(ids: Any, mask: Any, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "loss_mask": mask, **more}


def test_they_make_the_rows_that_their_conversations_make(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    conversations = [chat(f"q {i}", "an answer", "more?", f"{i} more") for i in range(70)]
    by_text = prepare(write_source(conversations), tokenizer, tmp_path, max_length=50)
    encoded = [encode(tokenizer, messages) for messages in conversations]
    source = write(tmp_path / "rows.jsonl", [row(ids, mask) for ids, mask in encoded])
    by_ids = prepare(source, tokenizer, tmp_path, max_length=50)
    assert len(by_ids.dataset) == len(by_text.dataset) == 70
    for mine, theirs in zip(by_ids.dataset, by_text.dataset, strict=True):
        assert mine["input_ids"].tolist() == theirs["input_ids"].tolist()
        assert mine["loss_mask"].tolist() == theirs["loss_mask"].tolist()
    assert by_text.info["cut"] == 70
    for count in ("tokens", "trained_tokens", "cut", "read"):
        assert by_ids.info[count] == by_text.info[count]


def test_messages_and_token_ids_in_one_source_keep_their_order(
    tokenizer: Any, chat: Any, tmp_path: Path
) -> None:
    first, second, third = (chat("q", f"answer {i}") for i in range(3))
    ids, mask = encode(tokenizer, second)
    told = [bool(trained) for trained in mask]
    rows = [{"messages": first}, row(ids, told, messages=first), {"messages": third}]
    prepared = prepare(write(tmp_path / "rows.jsonl", rows), tokenizer, tmp_path / "out")
    texts = [tokenizer.decode(one) for one in prepared.dataset["input_ids"]]
    assert [f"answer {i}" in text for i, text in enumerate(texts)] == [True] * 3


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [1, 2, 3]}, "input_ids without loss_mask"),
        (row(None, [1]), "input_ids is not a list of integers"),
        (row("123", [1]), "input_ids is not a list of integers"),
        (row([1.5, 2.0], [0, 1]), "input_ids is not a list of integers"),
        (row([[1, 2, 3]], [[0, 1, 1]]), "input_ids is not a list of integers"),
        (row([[1, 2], [3]], [0, 1, 1]), "input_ids is not a list of integers"),
        (row([1, 2, 3], [0, 1]), "input_ids and loss_mask differ in length"),
        (row([1, 2, 3], [0, 1, -100]), "loss_mask has other numbers than 0 and 1"),
        (row([1, 2, 10**6], [0, 1, 1]), "a token id that the target's tokenizer does not have"),
        (row([1, 2, -1], [0, 1, 1]), "a token id that the target's tokenizer does not have"),
        (
            row([0, 1, 2], [0, 1, 1], attention_mask=[0, 1, 1]),
            "padded: attention_mask leaves tokens out",
        ),
        (row([], []), "no assistant token"),
        (row([1, 2, 3], [0, 0, 0]), "no assistant token"),
    ],
)
def test_one_that_cannot_be_used_is_counted(
    tokenizer: Any, tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    good = row([1, 2, 3, 4], [0, 1, 1, 1], attention_mask=[1, 1, 1, 1])
    source = write(tmp_path / "rows.jsonl", [record, good])
    prepared = prepare(source, tokenizer, tmp_path / "out")
    assert prepared.counts == {reason: 1}
    assert prepared.dataset[0]["input_ids"].tolist() == [1, 2, 3, 4]


def test_no_prompts_are_held_out_of_them(tokenizer: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [row([1, 2, 3], [0, 1, 1])])
    with pytest.raises(HeadsmithError, match="rows.jsonl holds token ids.*validation.prompts"):
        prepare(source, tokenizer, tmp_path / "out", held_out=0.1)
    assert not list((tmp_path / "out").glob("*"))


def test_where_only_messages_are_read(tmp_path: Path) -> None:
    conversations = read_conversations(write(tmp_path / "rows.jsonl", [row([1, 2], [0, 1])]))
    assert not list(conversations)
    assert conversations.skipped == {"token ids instead of messages": 1}


def test_a_saved_data_set_of_another_program(tokenizer: Any, tmp_path: Path) -> None:
    columns = {"input_ids": [[1, 2, 3, 4]], "loss_mask": [[False, True, True, True]]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "theirs"))
    prepared = prepare(tmp_path / "theirs", tokenizer, tmp_path / "out")
    assert prepared.dataset[0]["loss_mask"].tolist() == [0, 1, 1, 1]


def test_prepared_data_are_a_source_for_their_tokenizer_only(
    make_tokenizer: Any, tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    first = prepare(write_source([chat("q", "a long answer")]), tokenizer, tmp_path)
    ids = first.dataset[0]["input_ids"]
    again = prepare(first.path, tokenizer, tmp_path / "out", max_length=len(ids) - 2)
    assert np.array_equal(again.dataset[0]["input_ids"], ids[:-2])
    other = make_tokenizer("chatml", "<|im_end|>", "pieces")
    with pytest.raises(HeadsmithError, match="another tokenizer; prepare .*data.json for this"):
        prepare(first.path, other, tmp_path / "out")


def test_they_are_shown_like_conversations(tokenizer: Any, chat: Any, tmp_path: Path) -> None:
    ids, mask = encode(tokenizer, chat("why?", "because"))
    source = write(tmp_path / "rows.jsonl", [row(ids, mask)])
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    assert inspect(str(source), tokenizer, console) == 1
    shown = console.export_text()
    assert "\u27e6because" in shown and "why?" in shown and f"{sum(mask)} trained" in shown
