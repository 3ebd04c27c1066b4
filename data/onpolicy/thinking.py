"""Thinking spans: which texts open and close them, and answers with or without them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headsmith.errors import HeadsmithError

Tags = tuple[str, str]

DEFAULT_TAGS: Tags = ("<think>", "</think>")
# What closes a span has a slash behind its bracket: <think>, <seed:think>, [THINK], <|think|>.
_CLOSING = re.compile(r"([<\[]\|?)/([\w:-]*think[\w:-]*)(\|?[>\]])", re.IGNORECASE)
# Harmony names channels instead; the answer is a message of its own.
_CHANNELS: Tags = ("<|channel|>analysis<|message|>", "<|end|>")
_FINAL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>final[^<]*<\|message\|>")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Keeps or drops what stands between `tags`, of which a model may have several."""

    keep: bool = True
    tags: tuple[Tags, ...] = (DEFAULT_TAGS,)

    def answer(self, text: str, opened: str = "") -> str | None:
        """The answer in what a model wrote behind a prompt that ended with `opened`; None when
        its thinking has no end.
        """
        whole = opened + text
        for begin, end in self.tags:
            # The template had opened the span, and nobody said so.
            if end in whole and begin not in whole and (begin, end) != _CHANNELS:
                whole = f"{begin}\n{whole}"
        rest = whole
        for begin, end in self.tags:
            rest = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", rest, flags=re.DOTALL)
            if begin in rest:
                return None
        return whole if self.keep else without_final_header(rest)

    def opened_by(self, prompt: str) -> str:
        """The end of a prompt that has opened a span; empty when it has not."""
        for begin, _ in self.tags:
            place = prompt.rfind(begin)
            if place >= 0 and not prompt[place + len(begin) :].strip():
                return prompt[place:]
        return ""

    def joined(self, thought: str, text: str) -> str:
        """One text of two fields, as servers give them."""
        if not self.keep or not thought.strip():
            return text
        begin, end = self.tags[0]
        return f"{begin}\n{thought.strip()}\n{end}\n\n{text}"


def without_final_header(text: str) -> str:
    """A text without what says that the final channel begins."""
    return _FINAL.sub("", text)


def known_tags(tokenizer: Any) -> tuple[Tags, ...]:
    """The tags that a tokenizer has tokens for or that its chat template writes; none where it
    has none.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    added = " ".join(str(token) for token in tokenizer.added_tokens_decoder.values())
    text = f"{template}\n{added}"
    found: dict[Tags, None] = {}
    for left, name, right in _CLOSING.findall(text):
        begin, end = f"{left}{name}{right}", f"{left}/{name}{right}"
        if begin in text:
            found[begin, end] = None
    if "<|channel|>" in added and "analysis" in template:
        found[_CHANNELS] = None
    return tuple(found)


def parse_tags(text: str) -> Tags:
    """`OPEN,CLOSE` as a pair. Raises HeadsmithError."""
    begin, _, end = text.partition(",")
    if not begin.strip() or not end.strip() or begin.strip() == end.strip():
        raise HeadsmithError(
            f"thinking-tags {text!r} are not two texts; give for example '<think>,</think>'"
        )
    return begin.strip(), end.strip()


def choose(keep: bool, given: str | None, tokenizer: Any = None) -> Thinking:
    """By what was given, else by the tokenizer, else `<think>`."""
    tags: Sequence[Tags] = ()
    if given is not None:
        tags = [parse_tags(given)]
    elif tokenizer is not None:
        tags = known_tags(tokenizer)
    if keep and _CHANNELS in tags:
        raise HeadsmithError(
            "this target thinks in a channel of its own, which has no place in the text of an "
            "answer; add --thinking drop"
        )
    return Thinking(keep, tuple(tags) or (DEFAULT_TAGS,))
