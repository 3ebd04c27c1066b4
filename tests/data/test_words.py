"""Words and n-grams, and files whose lines wait for their order."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from headsmith.data.chats import Chats, line_of
from headsmith.data.lines import Spool
from headsmith.data.words import ngram_hashes, scramble, words
from headsmith.errors import HeadsmithError


def test_words_forget_case_punctuation_and_encoding() -> None:
    assert words("Hello,  WORLD!\nf(x_1) = 2.5") == ["hello", "world", "f", "x_1", "2", "5"]
    assert words("Cafe\u0301 \ufb01n Stra\u00dfe") == words("CAF\u00c9 fin STRASSE")
    assert words("\u4f60\u597dworld") == ["\u4f60", "\u597d", "world"]
    assert words("?!") == []


def test_ngrams_are_equal_where_the_words_are() -> None:
    one, two = "a b c d e".split(), "x b c d y".split()
    first, second = ngram_hashes(one, 3), ngram_hashes(two, 3)
    assert first.shape == (3,) and first.dtype == np.uint64
    assert first[1] == second[1] and len(set(first) | set(second)) == 5
    assert ngram_hashes(["a", "b"], 2) != ngram_hashes(["b", "a"], 2)
    assert len(ngram_hashes(one, 6)) == 0 and len(ngram_hashes([], 1)) == 0
    # The same in every process, unlike hash(): splitmix64 of a CRC, and nothing else.
    mixed = (crc32(b"red") + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
    assert ngram_hashes(["red"], 1).tolist() == [mixed ^ (mixed >> 31)]


def test_scrambled_numbers_are_all_different() -> None:
    numbers = scramble(np.arange(10_000, dtype=np.uint64))
    assert len(np.unique(numbers)) == 10_000
    assert abs((numbers >> np.uint64(63)).mean() - 0.5) < 0.02


def test_a_spool_writes_lines_in_any_order(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    with Spool(out) as spool:
        assert [spool.add(f"{i}\n".encode()) for i in range(4)] == [0, 1, 2, 3]
        spool.write([3, 1, 1])
        assert out.read_text() == "3\n1\n1\n"
        spool.add(b"4\n")
        spool.write()
    assert out.read_text() == "0\n1\n2\n3\n4\n"
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_chats_are_counted_whoever_stops_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 1}\n' + '{"prompt": "q", "question_id": 7}\n' * 3)
    chats = Chats([str(path)])
    for chat in chats:
        assert chat.id == "7" and chat.name == f"7 of {path}"
        break
    assert chats.skipped == {"no messages": 1}
    assert [chat.row for chat in chats] == [0, 1, 2] and chats.read == {str(path): 3}
    with pytest.raises(HeadsmithError, match="named twice"):
        Chats([str(path), str(path)])
    with pytest.raises(HeadsmithError, match="name at least one"):
        Chats([])


def test_questions_stay_questions(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    asked = {"role": "user", "content": "q"}
    rows = [
        {"turns": ["q", "r"]},
        {"prompt": "q"},
        {"messages": [asked, asked]},
        {"prompt": [asked]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = list(Chats([str(path)]))
    assert [chat.turns for chat in first] == [True, True, False, False]
    copy.write_bytes(b"".join(line_of(chat.to_json()) for chat in first))
    again = list(Chats([str(copy)]))
    assert [(c.messages, c.turns) for c in again] == [(c.messages, c.turns) for c in first]


def test_the_shipped_prompts_have_a_name() -> None:
    assert len(list(Chats(["default"]))) == 60
