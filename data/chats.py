"""Conversations and prompts of several sources, each with its id and where it came from.

What `mix`, `dedup` and `overlap` read and write, and what `regenerate` reads. Every source of
`read_conversations` will do, prompts (`turns`, `prompt`, or messages without an answer) included.
"""

from __future__ import annotations

import importlib.resources
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headsmith.data.read import Conversations, Message, are_turns, read_conversations
from headsmith.errors import HeadsmithError

SHIPPED = "default"
_ID_KEYS = ("id", "question_id", "task_id", "prompt_id")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, or the beginning of one that waits for its answers.

    `row` counts the usable rows of its source from 0; `id` is the row's own, where it has one.
    `turns` when its messages are questions of which each waits for an answer of its own.
    """

    messages: list[Message]
    source: str
    row: int
    id: str | None = None
    turns: bool = False

    @property
    def name(self) -> str:
        """What it is called in front of a person."""
        return f"{self.id if self.id is not None else f'row {self.row}'} of {self.source}"

    def asked(self) -> list[str]:
        """The texts of the user."""
        return [m["content"] for m in self.messages if m["role"] == "user"]

    def to_json(self) -> dict[str, Any]:
        """As a row of a file: `read_conversations` and `headsmith eval` read it."""
        given = {} if self.id is None else {"id": self.id}
        said = {"turns": self.asked()} if self.turns else {"messages": self.messages}
        return {**given, "source": self.source, **said}


@dataclass(slots=True)
class Chats:
    """The chats of `sources`, in order; iterate it to read them, as often as needed.

    `read`, `skipped` and `warnings` describe the latest pass: usable rows by source, rows left out
    by reason, sentences about the sources.
    """

    sources: Sequence[str]
    split: str | None = None
    revision: str | None = None
    read: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    _opened: list[tuple[str, Conversations]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.sources:
            raise HeadsmithError("no source of conversations was given; name at least one")
        twice = [source for source, count in Counter(self.sources).items() if count > 1]
        if twice:
            raise HeadsmithError(f"the source {twice[0]} is named twice; name it once")
        # All of them now: a wrong path must not show after the first has been worked through.
        self._opened = [(source, self._open(source)) for source in self.sources]

    def _open(self, source: str) -> Conversations:
        place = source
        if source == SHIPPED and not Path(source).exists():
            place = str(shipped_prompts())
        return read_conversations(place, split=self.split, revision=self.revision, prompts=True)

    def __iter__(self) -> Iterator[Chat]:
        self.read, self.skipped, self.warnings = Counter(), Counter(), []
        for source, conversations in self._opened:
            self.read[source] = 0
            try:
                for record, messages in conversations.records():
                    row = self.read[source]
                    self.read[source] += 1
                    yield Chat(messages, source, row, _id_of(record), are_turns(record))
            finally:
                # Whoever has read enough wants to know of the rows so far, too.
                self.skipped += conversations.skipped
                self.warnings += conversations.warnings
            if not self.read[source]:
                raise HeadsmithError(_nothing_in(source, conversations))


def shipped_prompts() -> Path:
    """The evaluation prompts that come with the package."""
    return Path(str(importlib.resources.files("headsmith.data") / "prompts" / "default.jsonl"))


def line_of(row: dict[str, Any]) -> bytes:
    """A row as a line of JSON Lines. A text that is no valid Unicode loses what is not."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _id_of(record: object) -> str | None:
    if not isinstance(record, dict):
        return None
    return next((str(record[key]) for key in _ID_KEYS if record.get(key) is not None), None)


def _nothing_in(source: str, conversations: Conversations) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in conversations.skipped.items())
    return f"{source} holds no conversation that can be used ({reasons or 'it has no row'})"
