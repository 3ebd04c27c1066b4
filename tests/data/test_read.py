"""Reading conversations: every layout, files, folders and the Hub, and what is no source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from headsmith.data.hub import is_hub_id
from headsmith.data.read import read_conversations
from headsmith.errors import EnvironmentFault, HeadsmithError

Write = Callable[[str, str], Path]
GOOD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = {
    "id": "x",
    "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"messages": [{**GOOD[0], "content": f"q{i}"}, GOOD[1]]} for i in range(count)]


def questions(source: Any, **options: Any) -> list[str]:
    return [c[0]["content"] for c in read_conversations(source, **options)]


# Layouts


@pytest.mark.parametrize(
    "record",
    [
        {"messages": GOOD},
        SHAREGPT,
        {"conversations": GOOD},
        GOOD,
        {"messages": [{"role": "human", "content": "q"}, {"role": "ChatGPT", "content": "a"}]},
        {"messages": [{"from": "user", "value": "q"}, {"from": "bing", "value": "a"}]},
        {"messages": [GOOD[0], {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [GOOD[0], {"role": "assistant", "content": ["", "a"]}]},
        {"messages": None, "conversations": GOOD},
    ],
)
def test_every_layout_becomes_roles_and_contents(write: Write, record: Any) -> None:
    path = write("data.jsonl", json.dumps(record))
    assert list(read_conversations(path)) == [GOOD]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "x"}, "no messages"),
        ({"messages": []}, "no messages"),
        ("x", "no messages"),
        ({"messages": [GOOD[0]]}, "no assistant message"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no assistant message"),
        ({"messages": GOOD[::-1]}, "does not start with a user message"),
        ({"messages": [*GOOD, {"role": "tool", "content": "x"}]}, "unknown role: tool"),
        ({"messages": [*GOOD, {"content": "x"}]}, "a message without a role"),
        ({"messages": [*GOOD, "x"]}, "a message is not an object"),
        ({"messages": [*GOOD, {"role": "user", "content": " \n"}]}, "empty content"),
        ({"messages": [*GOOD, {"role": "user", "content": None}]}, "empty content"),
        ({"messages": [*GOOD, {"role": "user", "content": 7}]}, "content is not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}, GOOD[1]]},
            "content is not text",
        ),
    ],
)
def test_a_row_that_is_not_used_is_counted_under_its_reason(
    write: Write, record: Any, reason: str
) -> None:
    path = write("data.json", json.dumps([record, {"messages": GOOD}]))
    conversations = read_conversations(path)
    assert list(conversations) == [GOOD]
    assert conversations.skipped == {reason: 1}


def test_roles_are_counted_as_the_source_writes_them_and_a_second_pass_starts_anew(
    write: Write,
) -> None:
    path = write("data.json", json.dumps([SHAREGPT, {"messages": GOOD}, {}]))
    conversations = read_conversations(path)
    for _ in range(2):
        assert len(list(conversations)) == 2
        assert conversations.roles == {"human": 1, "gpt": 1, "user": 1, "assistant": 1}
        assert conversations.skipped == {"no messages": 1}
        assert conversations.progress == 1.0


def test_a_system_message_may_come_first(write: Write) -> None:
    messages = [{"role": "system", "content": "s"}, *GOOD]
    path = write("data.json", json.dumps([{"messages": messages}]))
    assert list(read_conversations(path)) == [messages]


# Files and folders


def test_lines_are_recognised_without_their_suffix(write: Write) -> None:
    path = write("data.json", "".join(json.dumps(r) + "\n" for r in rows(3)))
    assert questions(path) == ["q0", "q1", "q2"]


def test_parquet_and_both_arrow_layouts(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows(600))
    pq.write_table(table, tmp_path / "data.parquet")
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    pa.feather.write_feather(table, str(tmp_path / "file.arrow"), compression="uncompressed")
    for name in ("data.parquet", "stream.arrow", "file.arrow"):
        assert questions(tmp_path / name) == [f"q{i}" for i in range(600)], name


def test_saved_data_sets_and_their_splits(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(rows(3))
    data.save_to_disk(str(tmp_path / "one"))
    splits = {"test": data.select([0]), "train": data.select([1, 2])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    assert questions(tmp_path / "one") == ["q0", "q1", "q2"]
    assert questions(tmp_path / "two") == ["q1", "q2"]
    assert questions(tmp_path / "two", split="test") == ["q0"]
    with pytest.raises(HeadsmithError, match="has no split dev; it has test, train"):
        questions(tmp_path / "two", split="dev")


def test_a_folder_of_files_is_read_in_the_order_of_their_names(
    tmp_path: Path, write: Write
) -> None:
    write("b.json", json.dumps(rows(2)))
    write("a.jsonl", json.dumps({"messages": GOOD}))
    write("README.md", "not data")
    assert questions(tmp_path) == ["q", "q0", "q1"]


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow"])
def test_a_damaged_table_is_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"PAR1" * 50 if name.endswith("parquet") else b"\xff\xff\xff\xff" * 50)
    with pytest.raises(HeadsmithError, match=f"{name} cannot be read as (Parquet|Arrow)") as error:
        list(read_conversations(path))
    assert "\n" not in str(error.value)


# What is no source


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.json", b"", "is empty; it should hold conversations as a JSON array"),
        ("blank.json", b" \n\t", "is empty"),
        ("notes.txt", b"hello there", "is not a JSON array, JSON Lines, Arrow or Parquet"),
        ("image.png", b"\x89PNG\r\n", "is not a JSON array"),
    ],
)
def test_a_file_that_is_nothing_of_the_kind(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadsmithError, match=message):
        read_conversations(tmp_path / name)


@pytest.mark.parametrize("source", ["missing.json", "/no/such/file", "data/missing.jsonl", "./a/b"])
def test_a_path_that_does_not_exist(source: str) -> None:
    with pytest.raises(HeadsmithError, match=f"called {source}; check the path"):
        read_conversations(source)


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="holds no data"):
        read_conversations(tmp_path)


# The Hub, which no test reaches


def test_a_hub_id_is_streamed_with_its_split_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(name: str, **options: Any) -> Any:
        asked.update(name=name, **options)
        return rows(2)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert questions("org/name", split="test", revision="main") == ["q0", "q1"]
    assert asked == {"name": "org/name", "split": "test", "revision": "main", "streaming": True}


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (datasets.exceptions.DatasetNotFoundError("gone"), HeadsmithError, "no data set org/name"),
        (
            datasets.exceptions.DatasetNotFoundError("'org/name' is a gated dataset on the Hub."),
            HeadsmithError,
            "asks for access; .* HF_TOKEN",
        ),
        (ConnectionError("no route\nat all"), EnvironmentFault, "cannot be reached .*no route"),
        (ValueError('Bad split: dev. Available splits: ["train"]'), HeadsmithError, "Bad split"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, kind: type[Exception], message: str
) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise fault

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(kind, match=message) as error:
        list(read_conversations("org/name"))
    assert "\n" not in str(error.value)


def test_an_existing_path_is_never_taken_for_a_hub_id(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    write("org/name", json.dumps(rows(1)))
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/name")
    assert questions("org/name") == ["q0"]
