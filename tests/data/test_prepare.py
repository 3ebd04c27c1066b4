"""Preparing: what is kept, what is counted, what the name of the folder means."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from headsmith.data import prepare as module
from headsmith.data.identity import source_identity, tokenizer_sha256
from headsmith.data.mask import encode
from headsmith.data.prepare import load_prepared, prepare
from headsmith.data.rows import trainable
from headsmith.errors import EnvironmentFault, HeadsmithError


def test_rows_are_the_encoded_conversations_in_order(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    conversations = [chat(f"question {i}", f"answer {i}", "more", "yes") for i in range(150)]
    prepared = prepare(write_source(conversations), tokenizer, tmp_path / "out")
    assert len(prepared.dataset) == 150 and not prepared.counts
    on_disk = datasets.load_from_disk(str(prepared.path))
    assert on_disk.features["input_ids"].feature.dtype == "int32"
    assert on_disk.features["loss_mask"].feature.dtype == "int8"
    for messages, row in zip(conversations, prepared.dataset, strict=True):
        ids, mask = encode(tokenizer, messages)
        used = max(i for i, trained in enumerate(mask) if trained) + 1
        assert row["input_ids"].tolist() == ids[:used]
        assert row["loss_mask"].tolist() == mask[:used]
    assert prepared.info["tokens"] == sum(len(row) for row in on_disk["input_ids"])
    assert prepared.info["trained_tokens"] == sum(sum(row) for row in on_disk["loss_mask"])


def test_every_row_that_is_not_used_has_its_reason(
    make_tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source(
        [
            chat("q", "good answer"),
            chat("q", "good answer"),
            [{"role": "system", "content": "s"}, *chat("q", "refused by the template")],
            chat("q " * 300, "beyond the limit"),
            chat("q"),
            [{"role": "alien", "content": "x"}],
            chat("q", "short", "r", "long " * 300),
            chat("x", "only five words or so"),
        ]
    )
    prepared = prepare(source, make_tokenizer("mistral"), tmp_path, max_length=200, min_trained=3)
    assert prepared.counts == {
        "duplicate": 1,
        "the chat template refuses it": 1,
        "no assistant token in the first 200": 1,
        "no assistant message": 1,
        "unknown role: alien": 1,
    }
    info = prepared.info
    assert (info["read"], info["rows"], info["cut"]) == (8, 3, 1)
    assert [len(row) for row in prepared.dataset["input_ids"]][1] == 200
    assert info["roles"]["alien"] == 1


def test_short_answers_are_counted(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat("q", "a"), chat("q", "a longer answer than that")])
    prepared = prepare(source, tokenizer, tmp_path, min_trained=5)
    assert prepared.counts == {"too few assistant tokens": 1}


def test_overlong_rows_are_cut_or_dropped(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat("q", "word " * 100), chat("q", "a")])
    cut = prepare(source, tokenizer, tmp_path, max_length=60)
    assert [len(row) for row in cut.dataset["input_ids"]] == [60, len(cut.dataset[1]["input_ids"])]
    assert cut.info["cut"] == 1 and not cut.counts
    dropped = prepare(source, tokenizer, tmp_path, max_length=60, overlong="drop")
    assert len(dropped.dataset) == 1 and dropped.counts == {"longer than 60 tokens": 1}
    assert dropped.path != cut.path


def test_a_question_after_the_last_answer_is_left_off(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    prepared = prepare(write_source([chat("q", "a", "and then?")]), tokenizer, tmp_path)
    assert "then" not in tokenizer.decode(prepared.dataset[0]["input_ids"])
    assert prepared.dataset[0]["loss_mask"][-1] == 1


def test_max_rows_stops_reading(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat(f"q{i // 2}", "a") for i in range(600)])
    prepared = prepare(source, tokenizer, tmp_path, max_rows=70)
    assert len(prepared.dataset) == 70
    assert prepared.counts == {"duplicate": 69} and prepared.info["read"] == 139
    assert "q69" in tokenizer.decode(prepared.dataset[69]["input_ids"])


# The name


def test_the_same_call_finds_the_folder_again_and_does_no_work(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source([chat("q", "a"), chat("q")])
    first = prepare(source, tokenizer, tmp_path)
    monkeypatch.setattr(module, "RowWriter", None)
    again = prepare(source, tokenizer, tmp_path)
    assert not first.reused and again.reused
    assert again.path == first.path and again.counts == first.counts == {"no assistant message": 1}
    assert again.dataset[0]["input_ids"].tolist() == first.dataset[0]["input_ids"].tolist()
    assert first.fingerprint == again.fingerprint
    assert first.path.name == f"data-{first.fingerprint.removeprefix('sha256:')[:12]}"


def test_the_name_follows_content_and_not_place(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat("q", "a")])
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "data.json"
    moved.write_bytes(source.read_bytes())
    assert prepare(moved, tokenizer, tmp_path).path == prepare(source, tokenizer, tmp_path).path


def test_whatever_makes_the_data_changes_the_name(
    make_tokenizer: Any, tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat("q", "a"), chat("r", "b")])
    other = write_source([chat("q", "a"), chat("r", "c")], "other/data.json".replace("/", "-"))
    paths = {
        prepare(source, tokenizer, tmp_path).path,
        prepare(other, tokenizer, tmp_path).path,
        prepare(source, tokenizer, tmp_path, max_length=100).path,
        prepare(source, tokenizer, tmp_path, max_rows=1).path,
        prepare(source, make_tokenizer("llama3", "<|im_end|>"), tmp_path).path,
        prepare(source, make_tokenizer("chatml", "</s>"), tmp_path).path,
        prepare(source, make_tokenizer("chatml", "<|im_end|>", "pieces"), tmp_path).path,
    }
    assert len(paths) == 7


def test_the_tokenizer_hash_ignores_truncation_and_padding(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer("chatml", "<|im_end|>")
    before = tokenizer_sha256(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding()
    assert tokenizer_sha256(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_sha256(tokenizer) != before


def test_a_hub_source_is_named_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    identity = source_identity("org/name", "train", commit)
    assert identity == {"hub": "org/name", "commit": commit, "split": "train"}


def test_a_failure_leaves_no_folder(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source([chat(f"q{i}", "a") for i in range(100)])

    def broken(*_: Any) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(module.Masker, "tokenize", broken)
    with pytest.raises(RuntimeError):
        prepare(source, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_the_machines_fault_and_leaves_nothing(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", full)
    with pytest.raises(EnvironmentFault, match="the disk is full while writing .*data-"):
        prepare(write_source([chat("q", "a")]), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_folder_says_what_to_do(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    path = prepare(write_source([chat("q", "a")]), tokenizer, tmp_path).path
    (path / "state.json").write_text("{")
    with pytest.raises(HeadsmithError, match="cannot be read .*delete the folder and run again"):
        load_prepared(path)


# Nothing to train on


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "q"}], "2 rows: 2 no assistant message"),
        (
            [{"role": "alien", "content": "q"}],
            "2 rows: 2 unknown role: alien; the roles seen are alien",
        ),
    ],
)
def test_no_assistant_token_stops_with_the_reason(
    tokenizer: Any, write_source: Any, tmp_path: Path, messages: Any, reason: str
) -> None:
    with pytest.raises(HeadsmithError, match=f"no assistant token.*{reason}"):
        prepare(write_source([messages] * 2), tokenizer, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_a_template_that_refuses_everything_is_quoted(
    make_tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([[{"role": "system", "content": "s"}, *chat("q", "a")]])
    with pytest.raises(HeadsmithError, match=r"1 the chat template refuses it \(.*take turns\)"):
        prepare(source, make_tokenizer("mistral"), tmp_path)


def test_an_empty_source(tokenizer: Any, write_source: Any, tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="data.json holds no conversation"):
        prepare(write_source([]), tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_length", 2), ("max_rows", 0), ("min_trained", 1), ("overlong", "x"), ("held_out", 1.0)],
)
def test_limits_are_checked(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path, option: str, value: Any
) -> None:
    with pytest.raises(HeadsmithError, match=f"^{option} is "):
        prepare(write_source([chat("q", "a")]), tokenizer, tmp_path, **{option: value})


# Held out


def test_held_out_prompts_share_no_question_with_the_rows(
    tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    conversations = [chat(f"q{i % 40}", f"a{i}", "then?", "end") for i in range(80)]
    prepared = prepare(write_source(conversations), tokenizer, tmp_path, held_out=0.3)
    assert prepared.held_out is not None
    lines = [json.loads(line) for line in prepared.held_out.read_text().splitlines()]
    assert len(lines) == prepared.info["held_out"] > 0
    assert len(lines) + len(prepared.dataset) == prepared.info["read"] == 80
    asked = {line["messages"][0]["content"] for line in lines}
    assert 4 < len(asked) < 20
    assert all(line["messages"][-1] == {"role": "user", "content": "then?"} for line in lines)
    trained = {tokenizer.decode(row) for row in prepared.dataset["input_ids"]}
    assert not any(f"\n{question}<" in text for question in asked for text in trained)
    assert prepare(write_source(conversations), tokenizer, tmp_path).held_out is None


@pytest.mark.parametrize(
    ("mask", "usable"),
    [([0, 1, 1], True), ([1, 1, 0], False), ([0, 1, 0, 1], False), ([1, 1, 1], True), ([1], False)],
)
def test_trainable_needs_two_trained_tokens_in_a_row_after_the_first(
    mask: list[int], usable: bool
) -> None:
    assert trainable(np.array(mask, dtype=np.int8)) is usable
