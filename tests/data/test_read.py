"""Reading conversations: every layout, every container, and every way that a source is broken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from headsmith.data import json_records
from headsmith.data.hub import is_hub_id
from headsmith.data.read import read_conversations
from headsmith.errors import EnvironmentFault, HeadsmithError

GOOD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = {
    "id": "x",
    "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


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
def test_every_layout_becomes_roles_and_contents(tmp_path: Path, record: Any) -> None:
    path = write(tmp_path / "data.jsonl", json.dumps(record))
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
    tmp_path: Path, record: Any, reason: str
) -> None:
    path = write(tmp_path / "data.json", json.dumps([record, {"messages": GOOD}]))
    conversations = read_conversations(path)
    assert list(conversations) == [GOOD]
    assert conversations.skipped == {reason: 1}


def test_roles_are_counted_as_the_source_writes_them_and_a_second_pass_starts_anew(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "data.json", json.dumps([SHAREGPT, {"messages": GOOD}, {}]))
    conversations = read_conversations(path)
    for _ in range(2):
        assert len(list(conversations)) == 2
        assert conversations.roles == {"human": 1, "gpt": 1, "user": 1, "assistant": 1}
        assert conversations.skipped == {"no messages": 1}
        assert conversations.progress == 1.0


def test_a_system_message_may_come_first(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, *GOOD]
    path = write(tmp_path / "data.json", json.dumps([{"messages": messages}]))
    assert list(read_conversations(path)) == [messages]


# JSON arrays


@pytest.fixture(params=[5, 64, 1 << 20])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_records, "_CHUNK", request.param)
    return request.param


def array_text() -> str:
    texts = [
        'plain "quoted" \\ text',
        "caf\u00e9 \u4f60\u597d \U0001f600",
        "line\nbreak [1, {2}]",
        "x" * 90,
    ]
    data = [{"messages": [{**GOOD[0], "content": t}, GOOD[1]]} for t in texts]
    return json.dumps(data, ensure_ascii=False, indent=1)


def test_an_array_is_read_whole_whatever_the_chunk(tmp_path: Path, chunk: int) -> None:
    path = write(tmp_path / "data.json", "\ufeff  " + array_text() + "\n")
    conversations = read_conversations(path)
    assert [c[0]["content"] for c in conversations] == [
        record["messages"][0]["content"] for record in json.loads(array_text())
    ]
    assert conversations.warnings == []


def test_an_array_cut_at_any_byte_gives_what_was_whole_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "_CHUNK", 64)
    whole = array_text().encode()
    decoder = json.JSONDecoder()
    ends, starts, at = [], [], 1
    while (start := array_text().find("{", at)) >= 0:
        at = decoder.raw_decode(array_text(), start)[1]
        starts.append(len(array_text()[:start].encode()))
        ends.append(len(array_text()[:at].encode()))
    assert len(ends) == 4
    path = tmp_path / "cut.json"
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        conversations = read_conversations(path)
        count = len(list(conversations))
        assert count == sum(end <= cut for end in ends), cut
        (warning,) = conversations.warnings
        assert f"cut off: it ends at byte {cut} " in warning and f"the {count} records" in warning
        if any(start < cut < end for start, end in zip(starts, ends, strict=True)):
            assert f"inside the record that begins at byte {starts[count]};" in warning


def test_damage_in_the_middle_names_its_byte_and_reads_no_further(
    tmp_path: Path, chunk: int
) -> None:
    good, filler = json.dumps({"messages": GOOD}), json.dumps([{"messages": GOOD}] * 20)[1:]
    path = write(tmp_path / "data.json", f'[{good}, {{"a" 1}}, {filler}')
    conversations = read_conversations(path)
    assert list(conversations) == [GOOD]
    (warning,) = conversations.warnings
    assert f"begins at byte {len(good) + 3};" in warning
    assert f"damaged at byte {len(good) + 8} " in warning or chunk < 64


def test_text_that_is_not_utf8_names_its_byte(tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(b'[{"messages": "caf\xe9 and more"}]')
    with pytest.raises(HeadsmithError, match="is not UTF-8 at byte 18; "):
        list(read_conversations(path))


def test_a_record_far_larger_than_a_chunk(tmp_path: Path, chunk: int) -> None:
    big = [{**GOOD[0], "content": "y" * 5000}, GOOD[1]]
    path = write(tmp_path / "data.json", json.dumps([{"messages": big}, {"messages": GOOD}]))
    assert list(read_conversations(path)) == [big, GOOD]


def test_an_empty_array_is_no_conversation_and_no_warning(tmp_path: Path) -> None:
    conversations = read_conversations(write(tmp_path / "data.json", "[ ]"))
    assert list(conversations) == [] and conversations.warnings == []


@pytest.mark.slow
def test_the_cut_off_sharegpt_file() -> None:
    path = os.environ.get("HEADSMITH_SHAREGPT")
    if not path:
        pytest.skip("HEADSMITH_SHAREGPT does not point to the cut-off ShareGPT file")
    conversations = read_conversations(path)
    assert sum(1 for _ in conversations) > 10_000
    (warning,) = conversations.warnings
    assert f"ends at byte {Path(path).stat().st_size} inside the record" in warning


# JSON Lines


def test_bad_lines_are_counted_and_named_once(tmp_path: Path) -> None:
    good = json.dumps({"messages": GOOD})
    path = write(tmp_path / "data.jsonl", f"{good}\n{{bad\n\n{good}\n[1, 2\n{good[:-4]}")
    conversations = read_conversations(path)
    assert list(conversations) == [GOOD, GOOD]
    assert conversations.skipped == {"line is not JSON": 3}
    (warning,) = conversations.warnings
    assert warning.endswith("3 lines are not JSON and are left out: 2, 5, 6")


def test_lines_may_hold_lists_and_unicode_line_separators(tmp_path: Path) -> None:
    messages = [{**GOOD[0], "content": "a\u2028b"}, GOOD[1]]
    text = json.dumps(messages, ensure_ascii=False) + "\r\n"
    assert list(read_conversations(write(tmp_path / "d.jsonl", text * 2))) == [messages] * 2


def test_lines_are_recognised_without_their_suffix(tmp_path: Path) -> None:
    path = write(tmp_path / "data.json", "".join(json.dumps(r) + "\n" for r in rows(3)))
    assert questions(path) == ["q0", "q1", "q2"]


def test_no_good_line_at_all_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "data.json", "{\n 'a': 1\n}\n")
    with pytest.raises(HeadsmithError, match="is not JSON Lines: none of its 3 lines"):
        list(read_conversations(path))


# Arrow and Parquet


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


def test_a_folder_of_files_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.json", json.dumps(rows(2)))
    write(tmp_path / "a.jsonl", json.dumps({"messages": GOOD}))
    write(tmp_path / "README.md", "not data")
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    write(tmp_path / "org" / "name", json.dumps(rows(1)))
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/name")
    assert questions("org/name") == ["q0"]
