"""Conversations with their answers taken out, to be given new ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headsmith.data.chats import Chat
from headsmith.data.read import Message


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation of which `parts` are what stands before each answer: a user's message, with
    a system message where there is one.

    `key` is a hash of them, with a number behind it from their second occurrence on: what is drawn
    for a conversation depends on what it says, not on its name or its place in a file.
    """

    key: str
    id: str
    parts: tuple[tuple[Message, ...], ...]

    def history(self, answers: Sequence[str]) -> list[Message]:
        """The messages before the answer that follows `answers`, or all with the last of them."""
        messages: list[Message] = []
        for number, part in enumerate(self.parts[: len(answers) + 1]):
            messages += part
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        return messages

    def answered(self, answers: Sequence[str]) -> list[Message]:
        """The messages up to the last of `answers`."""
        return self.history(answers)[: sum(map(len, self.parts[: len(answers)])) + len(answers)]


def dialogues(
    chats: Iterable[Chat], system_prompt: str | None = None, limit: int | None = None
) -> list[Dialogue]:
    """The dialogues of chats, the first `limit` of them. `system_prompt` goes before those that
    begin without one.
    """
    found: list[Dialogue] = []
    seen: Counter[str] = Counter()
    for chat in chats:
        if limit is not None and len(found) == limit:
            break
        messages = chat.messages
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        parts = _parts(messages, chat.turns)
        text = json.dumps(parts, ensure_ascii=False).encode("utf-8", "replace")
        key = blake2b(text, digest_size=12).hexdigest()
        seen[key] += 1
        if seen[key] > 1:
            key = f"{key}-{seen[key]}"
        found.append(Dialogue(key, key if chat.id is None else chat.id, parts))
    return found


def _parts(messages: Sequence[Message], turns: bool) -> tuple[tuple[Message, ...], ...]:
    """What stands before each answer; a last question that has none yet gets one, and of `turns`
    each.
    """
    parts: list[tuple[Message, ...]] = []
    open_: list[Message] = []
    for message in messages:
        answered = message["role"] == "assistant"
        if not answered:
            open_.append(message)
        if open_ and (answered or (turns and message["role"] == "user")):
            parts.append(tuple(open_))
            open_ = []
    if any(message["role"] == "user" for message in open_):
        parts.append(tuple(open_))
    return tuple(parts)
