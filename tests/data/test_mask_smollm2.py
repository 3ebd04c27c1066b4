"""The mask on the real tokenizer and template of the default target."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from headsmith.data.mask import encode
from headsmith.data.prepare import prepare


@pytest.fixture(scope="module")
def smollm2(target_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(target_dir))


def runs(tokenizer: Any, messages: list[dict[str, str]]) -> list[tuple[int, str]]:
    encoded = encode(tokenizer, messages)
    pairs = groupby(zip(encoded.ids, encoded.mask, strict=True), key=lambda pair: pair[1])
    return [(trained, tokenizer.decode([i for i, _ in run])) for trained, run in pairs]


def test_answers_and_ends_of_turns_are_trained_and_headers_are_not(smollm2: Any, chat: Any) -> None:
    messages = chat("Hi", "Hello, you.", "2 + 2?", "4 \U0001f600\n\n```py\nx = 4\n```")
    (_, head), first, (_, middle), second, (_, tail) = runs(smollm2, messages)
    assert head.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert head.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert first == (1, "Hello, you.<|im_end|>")
    assert middle == "\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert second == (1, "4 \U0001f600\n\n```py\nx = 4\n```<|im_end|>")
    assert tail == "\n"


def test_ids_are_those_of_the_template_and_a_prompt_is_their_beginning(
    smollm2: Any, chat: Any
) -> None:
    messages = chat("Hi", "Hello, you.")
    ids, mask = encode(smollm2, messages)
    assert ids == smollm2.apply_chat_template(messages, return_dict=True)["input_ids"]
    prompt = smollm2.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt) - 1) + [0]
    assert ids[-2] == smollm2.eos_token_id


def test_a_given_system_message_replaces_the_default(smollm2: Any, chat: Any) -> None:
    (_, head), *_ = runs(smollm2, [{"role": "system", "content": "Be brief."}, *chat("q", "a")])
    assert head.startswith("<|im_start|>system\nBe brief.<|im_end|>") and "SmolLM" not in head


def test_prepared_rows_end_with_the_end_of_turn(
    smollm2: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat(f"question {i}", "an answer " * (i + 1)) for i in range(20)])
    prepared = prepare(source, smollm2, tmp_path / "out")
    assert all(ids[-1] == smollm2.eos_token_id for ids in prepared.dataset["input_ids"])
    assert prepared.info["rows"] == 20
