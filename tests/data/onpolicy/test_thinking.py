"""Thinking spans: found, kept, dropped, and never half of one in an answer."""

from __future__ import annotations

from typing import Any

import pytest

from headsmith.data.onpolicy.asking import Answer, Sampling, judged
from headsmith.data.onpolicy.thinking import Thinking, choose, known_tags
from headsmith.errors import HeadsmithError

KEEP, DROP = Thinking(True), Thinking(False)
HARMONY = ("<|channel|>analysis<|message|>", "<|end|>")


@pytest.mark.parametrize(
    ("text", "kept", "dropped"),
    [
        ("4", "4", "4"),
        ("<think>\n2+2\n</think>\n\n4", "<think>\n2+2\n</think>\n\n4", "\n\n4"),
        ("<think>a</think>b<think>c</think>d", "<think>a</think>b<think>c</think>d", "bd"),
        ("2+2\n</think>\n\n4", "<think>\n2+2\n</think>\n\n4", "\n\n4"),
        ("<think>2+", None, None),
        ("<think>a</think>4 <think>b", None, None),
    ],
)
def test_spans(text: str, kept: str | None, dropped: str | None) -> None:
    assert KEEP.answer(text) == kept and DROP.answer(text) == dropped


def test_a_span_that_the_prompt_opened() -> None:
    assert KEEP.opened_by("<|assistant|>\n<think>\n") == "<think>\n"
    assert KEEP.opened_by("<think>\n\n</think>\n\n") == KEEP.opened_by("user\n") == ""
    assert KEEP.answer("2+2\n</think>4", "<think>\n") == "<think>\n2+2\n</think>4"
    assert DROP.answer("2+2\n</think>4", "<think>\n") == "4"
    assert DROP.answer("2+", "<think>\n") is None


def test_harmony_has_channels() -> None:
    thinking = Thinking(False, (HARMONY,))
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"
    assert thinking.answer(text) == "4"
    assert thinking.answer("<|channel|>final<|message|>4") == "4"
    assert thinking.answer("<|channel|>analysis<|message|>hm") is None


def tokenizer(template: str, *added: str) -> Any:
    class Known:
        chat_template = template
        added_tokens_decoder = dict(enumerate(added))

        def get_chat_template(self) -> str:
            return template

    return Known()


def test_tags_of_tokenizers_and_templates() -> None:
    assert known_tags(tokenizer("", "<think>", "</think>", "<pad>")) == (("<think>", "</think>"),)
    assert known_tags(tokenizer("{{ '[THINK]' }}x[/THINK]")) == (("[THINK]", "[/THINK]"),)
    assert known_tags(tokenizer("<seed:think></seed:think>")) == (
        ("<seed:think>", "</seed:think>"),
    )
    assert known_tags(tokenizer("{{ x.split('</think>') }}")) == ()
    assert known_tags(tokenizer("analysis", "<|channel|>")) == (HARMONY,)
    assert known_tags(tokenizer("plain", "<s>")) == ()


def test_what_is_given_wins_and_something_is_always_known() -> None:
    has = tokenizer("<reason_think></reason_think>")
    assert choose(True, "<a>, </a>", has).tags == (("<a>", "</a>"),)
    assert choose(True, None, has).tags == (("<reason_think>", "</reason_think>"),)
    assert choose(False, None).tags == (("<think>", "</think>"),)
    for given in ("<a>", "<a>,", ",", "a,a"):
        with pytest.raises(HeadsmithError, match="thinking-tags .* give for example"):
            choose(True, given)
    with pytest.raises(HeadsmithError, match="add --thinking drop"):
        choose(True, None, tokenizer("analysis", "<|channel|>"))


def test_judging() -> None:
    assert judged("<think>a</think> \n", "", False, DROP) == Answer("empty")
    assert judged("<think>a", "", True, DROP).status == "thinking"
    assert judged("<think>a", "", False, KEEP).status == "empty"
    assert judged(" 4\ufffd", "", True, KEEP) == Answer("length", "4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top-p is 0"),
        ({"temperature": 1.0, "top_k": 0}, "top-k is 0"),
        ({"top_p": 0.5}, "top-p means nothing at temperature 0"),
        ({"top_k": 5}, "top-k means nothing at temperature 0"),
    ],
)
def test_sampling_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadsmithError, match=words):
        Sampling(**options)
