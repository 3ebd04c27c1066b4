"""Where an answer ends: in the order of the tokens, whatever pass they came from."""

from __future__ import annotations

from typing import Any

import pytest

from headsmith.inference.stop import StopRule


def rule(**changes: Any) -> StopRule:
    defaults: dict[str, Any] = {"stop_ids": frozenset({9}), "max_new_tokens": 8, "max_context": 20}
    return StopRule(**{**defaults, **changes})


@pytest.mark.parametrize("offset", range(5))
def test_a_stop_id_at_every_offset_cuts_the_rest(offset: int) -> None:
    new = [1, 2, 3, 4, 5]
    new[offset] = 9
    output = [0]
    assert rule().append(3, output, new) == (offset + 1, "eos")
    assert output == [0, *new[: offset + 1]]


def test_nothing_ends_it() -> None:
    output = [0]
    assert rule().append(3, output, [1, 2]) == (2, None)
    assert rule().append(3, output, []) == (0, None)
    assert output == [0, 1, 2]


@pytest.mark.parametrize("already", range(8))
def test_never_more_than_the_limit(already: int) -> None:
    output = list(range(10, 10 + already))
    assert rule().append(3, output, [1] * 9) == (8 - already, "length")
    assert len(output) == 8


@pytest.mark.parametrize("prompt", range(12, 20))
def test_never_more_than_the_context(prompt: int) -> None:
    output: list[int] = []
    count, reason = rule().append(prompt, output, [1] * 9)
    assert count == 20 - prompt == len(output)
    assert reason == ("length" if prompt == 12 else "context")


def test_the_first_of_several_reasons_counts() -> None:
    assert rule(max_new_tokens=2).append(3, [], [1, 2, 9]) == (2, "length")
    assert rule(max_new_tokens=2).append(3, [], [1, 9, 2]) == (2, "eos")
    assert rule(max_new_tokens=2, max_context=5).append(3, [], [1, 2]) == (2, "length")
    assert rule(stop_ids=frozenset()).append(3, [], [9, 9]) == (2, None)


def spelled(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_stop_string_may_straddle_steps(tiny_tokenizer: Any) -> None:
    stops = rule(stop_strings=("END", "zzz"), max_new_tokens=99, tokenizer=tiny_tokenizer)
    text = spelled(tiny_tokenizer, "the END of")
    for cut in range(len(text)):
        output: list[int] = []
        count, reason = stops.append(3, output, text[:cut])
        if reason is None:
            more, reason = stops.append(3, output, text[cut:])
            count += more
        assert reason == "stop" and count == len("the END")
        assert tiny_tokenizer.decode(output) == "the END"


def test_a_stop_string_of_several_bytes_a_letter(tiny_tokenizer: Any) -> None:
    stops = rule(stop_strings=("é",), max_new_tokens=99, tokenizer=tiny_tokenizer)
    output: list[int] = []
    assert stops.append(3, output, spelled(tiny_tokenizer, "café!")) == (5, "stop")
    assert tiny_tokenizer.decode(output) == "café"


def test_a_stop_id_before_a_stop_string_before_the_limits(tiny_tokenizer: Any) -> None:
    (letter,) = spelled(tiny_tokenizer, "x")
    both = rule(
        stop_ids=frozenset({letter}),
        stop_strings=("x",),
        max_new_tokens=1,
        tokenizer=tiny_tokenizer,
    )
    assert both.append(3, [], [letter]) == (1, "eos")
    string = rule(stop_strings=("x",), max_new_tokens=1, tokenizer=tiny_tokenizer)
    assert string.append(3, [], [letter]) == (1, "stop")
