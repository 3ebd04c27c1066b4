"""Prompts that are brought to a length: whole templates, the same questions, never too long."""

from __future__ import annotations

from typing import Any

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.context import AFTER, BEFORE, bring_to, context_of
from headsmith.inference.prompts import Conversation, RequestBuilder

TEXTS = ["red green blue", "one two three four", "tea and milk, please", "sun\n\nmoon   sea hill"]


@pytest.fixture
def builder(tiny_tokenizer: Any) -> RequestBuilder:
    return RequestBuilder(tiny_tokenizer, 1024)


def conversations(*texts: str) -> list[Conversation]:
    return [Conversation(str(i), "words", (text, "and then?")) for i, text in enumerate(texts)]


def prompt_of(one: Conversation, builder: RequestBuilder) -> str:
    text: str = builder.tokenizer.decode(builder.build(one).prompt_ids)
    return text


@pytest.mark.parametrize("system", [None, "be brief"])
def test_prompts_come_as_close_to_the_length_as_words_allow(
    builder: RequestBuilder, system: str | None
) -> None:
    builder.system_prompt = system
    longer, warnings = bring_to(conversations(*TEXTS), builder, (250, 700))
    assert warnings == [] and len(longer) == 8
    for one in longer:
        wanted, size = context_of(one.task), len(builder.build(one).prompt_ids)
        # A byte is a token here; the longest word with the white space behind it has nine.
        assert wanted - 9 < size <= wanted
        assert one.task == f"words@{wanted}"


def test_template_question_and_order_stay(builder: RequestBuilder) -> None:
    builder.system_prompt = "be brief"
    longer, _ = bring_to(conversations(*TEXTS), builder, (300,))
    text = prompt_of(longer[1], builder)
    start = f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n{BEFORE}tea and milk"
    assert text.startswith(start)
    end = f"<|im_start|>assistant\n{AFTER}<|im_end|>\n<|im_start|>user\n{TEXTS[1]}<|im_end|>\n"
    assert text.endswith(end + "<|im_start|>assistant\n")
    assert text.count(TEXTS[1]) == 1, "a prompt is not told its own question before"
    assert longer[1].turns == (TEXTS[1],)


def test_the_texts_go_round_when_they_are_few(builder: RequestBuilder) -> None:
    longer, _ = bring_to(conversations("red", "one"), builder, (400,))
    assert prompt_of(longer[0], builder).count("one\n\nand then?") > 5


def test_given_messages_stay_behind_the_filler(builder: RequestBuilder) -> None:
    given = (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "good day"},
    )
    one = Conversation("a", "words", ("red",), given)
    longer, _ = bring_to([one, *conversations("one")], builder, (300,))
    roles = [message["role"] for message in longer[0].context]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert longer[0].context[0] == given[0] and longer[0].context[3:] == given[1:]


def test_what_is_too_long_is_left_out_of_every_length(builder: RequestBuilder) -> None:
    some = conversations(*TEXTS, "long " * 60, "longer " * 400)
    longer, warnings = bring_to(some, builder, (200, 500))
    assert [one.id for one in longer] == ["0", "1", "2", "3"] * 2
    assert warnings == ["2 of 6 prompts are longer than context 200 and left out"]


def test_a_prompt_without_room_for_the_filler_stays_as_it_is(builder: RequestBuilder) -> None:
    some = conversations("red " * 30, "one")
    size = len(builder.build(some[0]).prompt_ids)
    longer, _ = bring_to(some, builder, (size + 20,))
    assert longer[0].context == () and len(builder.build(longer[0]).prompt_ids) == size


@pytest.mark.parametrize(
    ("count", "lengths", "words"),
    [
        (4, (20,), "every prompt is longer than context 20"),
        (4, (200, 1024), "context 1024 leaves no room for an answer"),
        (1, (200,), "there is only one"),
    ],
)
def test_what_cannot_be_had_is_said(
    builder: RequestBuilder, count: int, lengths: tuple[int, ...], words: str
) -> None:
    with pytest.raises(HeadsmithError, match=words):
        bring_to(conversations(*TEXTS[:count]), builder, lengths)
