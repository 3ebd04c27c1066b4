"""Conversations out of any source, in one shape, with a count of every row that is left out.

Two layouts are read: `conversations` with `from` and `value`, and `messages` with `role` and
`content`, where the content may be a list of text parts. What is yielded is always a list of
`{"role": "system" | "user" | "assistant", "content": str}`. Who asks for prompts as well also gets
rows without an answer, and those of `turns` or `prompt`; who asks for rows to train on gets those
of token ids too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from headsmith.data.notes import Notes, Unused
from headsmith.data.sources import Reader, locate
from headsmith.data.token_rows import TokenRow, is_tokens, token_row

Message = dict[str, str]
Read = TypeVar("Read")

# The speakers that public data sets name, not the strings of any chat template.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "instruction"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "ai"), "assistant"
    ),
    "system": "system",
}


@dataclass(slots=True)
class Conversations:
    """The conversations of a source; iterate it to read them, as often as needed.

    `skipped`, `roles` and `warnings` describe the latest pass and fill while it runs: rows left
    out by reason, messages by the role that the source gives them, sentences about the source.
    """

    source: str
    reader: Reader
    notes: Notes = field(default_factory=Notes)
    prompts: bool = False

    @property
    def skipped(self) -> Counter[str]:
        return self.notes.skipped

    @property
    def roles(self) -> Counter[str]:
        return self.notes.roles

    @property
    def warnings(self) -> list[str]:
        return self.notes.warnings

    @property
    def progress(self) -> float | None:
        """The fraction of the source that has been read; None where its size is not known."""
        return min(self.notes.done / self.notes.total, 1.0) if self.notes.total else None

    def __iter__(self) -> Iterator[list[Message]]:
        return (messages for _, messages in self.records())

    def records(self) -> Iterator[tuple[object, list[Message]]]:
        """Each conversation behind the record that the source holds of it."""
        return self._pass(self._conversation)

    def rows(self, vocab_size: int) -> Iterator[list[Message] | TokenRow]:
        """What can be trained on: each conversation, and each row that is tokenised already for a
        tokenizer of `vocab_size` ids.
        """

        def read(record: object) -> list[Message] | TokenRow:
            if is_tokens(record):
                return token_row(record, vocab_size)
            return self._conversation(record)

        return (row for _, row in self._pass(read))

    def _conversation(self, record: object) -> list[Message]:
        return _messages(record, self.notes.roles, self.prompts)

    def _pass(self, read: Callable[[object], Read]) -> Iterator[tuple[object, Read]]:
        """What `read` makes of each record, behind the record; Unused is counted."""
        self.notes = Notes()
        for record in self.reader(self.notes):
            try:
                found = read(record)
            except Unused as reason:
                self.notes.skipped[str(reason)] += 1
                continue
            yield record, found


def read_conversations(
    source: str | Path,
    *,
    split: str | None = None,
    revision: str | None = None,
    prompts: bool = False,
) -> Conversations:
    """Open a JSON array, JSON Lines, Arrow or Parquet file, a folder of them, or a Hub data set.

    `split` (default: train) is for sources that have splits, `revision` for the Hub. The network
    is used only for an `ORG/NAME` that is no path here. A damaged array gives the records before
    the damage and one warning with the byte. With `prompts`, rows without an answer count too.
    Raises HeadsmithError, here or while iterating, for a source that does not exist or is nothing
    of the above.
    """
    return Conversations(str(source), locate(source, split, revision), prompts=prompts)


def _messages(record: object, roles: Counter[str], prompts: bool) -> list[Message]:
    turns = record
    if isinstance(record, dict):
        turns = record.get("messages") or record.get("conversations")
        if prompts and not turns:
            turns = _asked(record)
    if not isinstance(turns, list) or not turns:
        raise Unused("token ids instead of messages" if is_tokens(record) else "no messages")
    messages = [_message(turn, roles) for turn in turns]
    speakers = [message["role"] for message in messages]
    if "assistant" not in speakers and not prompts:
        raise Unused("no assistant message")
    first = next((speaker for speaker in speakers if speaker != "system"), None)
    if first is None:
        raise Unused("no user message")
    if first != "user":
        raise Unused("does not start with a user message")
    return messages


def _asked(record: dict[str, object]) -> object:
    """The user messages of a row of `turns` or `prompt`: a text, or a list of texts."""
    asked = record.get("turns") or record.get("prompt")
    texts = [asked] if isinstance(asked, str) else asked
    if isinstance(texts, list):
        return [{"role": "user", "content": t} if isinstance(t, str) else t for t in texts]
    return texts


def are_turns(record: object) -> bool:
    """Whether a record's messages are those of `turns` or `prompt`, each of which waits for an
    answer.
    """
    if not isinstance(record, dict) or record.get("messages") or record.get("conversations"):
        return False
    asked = record.get("turns") or record.get("prompt")
    return isinstance(asked, str) or all(isinstance(text, str) for text in asked or ())


def _message(turn: object, roles: Counter[str]) -> Message:
    if not isinstance(turn, dict):
        raise Unused("a message is not an object")
    given = turn.get("role") or turn.get("from")
    if not isinstance(given, str):
        raise Unused("a message without a role")
    roles[given] += 1
    role = ROLES.get(given.lower())
    if role is None:
        raise Unused(f"unknown role: {given[:30]}")
    content = _text(turn["content"] if turn.get("content") is not None else turn.get("value"))
    if not content.strip():
        raise Unused("empty content")
    return {"role": role, "content": content}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise Unused("content is not text")
    return content


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise Unused("content is not text")
    return text
