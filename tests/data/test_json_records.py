"""JSON arrays and JSON Lines: read whole whatever the chunk, and up to the place of any damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headsmith.data import json_records
from headsmith.data.read import read_conversations
from headsmith.errors import HeadsmithError

Write = Callable[[str, str], Path]
GOOD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


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


def test_an_array_is_read_whole_whatever_the_chunk(write: Write, chunk: int) -> None:
    path = write("data.json", "\ufeff  " + array_text() + "\n")
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


def test_damage_in_the_middle_names_its_byte_and_reads_no_further(write: Write, chunk: int) -> None:
    good, filler = json.dumps({"messages": GOOD}), json.dumps([{"messages": GOOD}] * 20)[1:]
    path = write("data.json", f'[{good}, {{"a" 1}}, {filler}')
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


def test_a_record_far_larger_than_a_chunk(write: Write, chunk: int) -> None:
    big = [{**GOOD[0], "content": "y" * 5000}, GOOD[1]]
    path = write("data.json", json.dumps([{"messages": big}, {"messages": GOOD}]))
    assert list(read_conversations(path)) == [big, GOOD]


def test_an_empty_array_is_no_conversation_and_no_warning(write: Write) -> None:
    conversations = read_conversations(write("data.json", "[ ]"))
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


def test_bad_lines_are_counted_and_named_once(write: Write) -> None:
    good = json.dumps({"messages": GOOD})
    path = write("data.jsonl", f"{good}\n{{bad\n\n{good}\n[1, 2\n{good[:-4]}")
    conversations = read_conversations(path)
    assert list(conversations) == [GOOD, GOOD]
    assert conversations.skipped == {"line is not JSON": 3}
    (warning,) = conversations.warnings
    assert warning.endswith("3 lines are not JSON and are left out: 2, 5, 6")


def test_lines_may_hold_lists_and_unicode_line_separators(write: Write) -> None:
    messages = [{**GOOD[0], "content": "a\u2028b"}, GOOD[1]]
    text = json.dumps(messages, ensure_ascii=False) + "\r\n"
    assert list(read_conversations(write("d.jsonl", text * 2))) == [messages] * 2


def test_no_good_line_at_all_is_an_error(write: Write) -> None:
    path = write("data.json", "{\n 'a': 1\n}\n")
    with pytest.raises(HeadsmithError, match="is not JSON Lines: none of its 3 lines"):
        list(read_conversations(path))
