"""What is asked and what comes back; a status is never part of a text.

ok        the target ended its answer itself
length    the limit of new tokens, or the context, ended it
refused   a content filter, or the model's own refusal in a field of its own
empty     nothing but white space, or nothing behind the thinking
thinking  the limit ended it while it thought
too_long  the prompt leaves no room for an answer
template  the chat template refuses the conversation
error     the server failed, however often it was asked; a later run asks again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

from headsmith.data.onpolicy.thinking import Thinking
from headsmith.errors import HeadsmithError

Status = Literal["ok", "length", "refused", "empty", "thinking", "too_long", "template", "error"]
# With these an answer has a text; with any other its conversation ends before it.
ANSWERED = ("ok", "length")


@dataclass(frozen=True, slots=True)
class Ask:
    """The `turn`th answer (from 0) of the conversation `key`, behind `messages`."""

    key: str
    turn: int
    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, or why there is none, with what a person may want to know of it in `detail`."""

    status: Status
    text: str = ""
    detail: str = ""


Done = Callable[[Ask, Answer], None]


class Answerer(Protocol):
    """Whoever answers."""

    def answer(self, asks: Sequence[Ask], done: Done) -> None:
        """Answers all of `asks`, in any order, and calls `done` once for each, as soon as its
        answer is there. Raises HeadsmithError when no further answer can be had.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are chosen: greedily at temperature 0, else drawn, by the seed."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise HeadsmithError(f"max-new-tokens is {self.max_new_tokens}; it must be 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise HeadsmithError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise HeadsmithError(f"top-p is {self.top_p}; it must be above 0, at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise HeadsmithError(f"top-k is {self.top_k}; it must be 1 or more")
        cut = "top-p" if self.top_p is not None else "top-k" if self.top_k is not None else None
        if cut and not self.temperature:
            raise HeadsmithError(
                f"{cut} means nothing at temperature 0, which takes the likeliest token; add "
                "--temperature"
            )

    def describe(self) -> dict[str, Any]:
        """What the texts depend on, by the names of the options."""
        drawn = {"top-p": self.top_p, "top-k": self.top_k, "seed": self.seed}
        return {
            "max-new-tokens": self.max_new_tokens,
            "temperature": self.temperature,
            **(drawn if self.temperature else dict.fromkeys(drawn)),
        }

    def seed_of(self, ask: Ask) -> int:
        """For engines that draw by themselves: a seed of 31 bits for every answer."""
        name = f"{self.seed}/{ask.turn}/{ask.key}".encode()
        return int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 33


def judged(raw: str, opened: str, cut: bool, thinking: Thinking) -> Answer:
    """The answer in what a model wrote; `opened` is what the prompt has opened of its thinking,
    `cut` whether a limit ended it.
    """
    # A limit may end a text inside a character.
    text = raw.removesuffix("\ufffd") if cut else raw
    found = thinking.answer(text, opened)
    if found is None:
        return Answer("thinking" if cut else "empty", detail="the thinking has no end")
    if not found.strip():
        return Answer("empty")
    return Answer("length" if cut else "ok", found.strip())
