"""The mask against a slow oracle and against the text that a reader would mark by hand."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from headsmith.data.mask import Masker, encode, token_mask
from headsmith.data.template import TemplateRefused
from headsmith.errors import HeadsmithError

# Template, end-of-text token, and what the oracle is told ends a turn.
CASES = [
    ("chatml", "<|im_end|>", "<|im_end|>"),
    ("llama3", "<|eot_id|>", "<|eot_id|>"),
    ("mistral", "</s>", "</s>"),
    ("spaced", "</s>", "</s>"),
    ("gemma", "</s>", "<end_of_turn>"),
    ("phi", "<|endoftext|>", "<|end|>"),
    ("plain", "</s>", ""),
    ("marked_inside", "<|im_end|>", "<|im_end|>"),
    ("marked_outside", "<|im_end|>", "<|im_end|>"),
]
FRAGMENTS = [
    "Hello", " world", "2 + 2 = 4", "\n", "\n\n", "  ", "assistant\n", "caf\u00e9", "\U0001f600",
    "def f(x):\n    return x", "\u4f60\u597d", "User: ", "[INST]", "<think>", "a", ".", "\t",
    "\u2028",
]  # fmt: skip


def trained(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    """The text of every run of trained tokens."""
    encoded = encode(tokenizer, messages)
    assert len(encoded.ids) == len(encoded.mask) and set(encoded.mask) <= {0, 1}
    runs = groupby(zip(encoded.ids, encoded.mask, strict=True), key=lambda pair: pair[1])
    return [
        tokenizer.decode([i for i, _ in run], clean_up_tokenization_spaces=False)
        for is_trained, run in runs
        if is_trained
    ]


def oracle(tokenizer: Any, messages: list[dict[str, str]], ending: str) -> list[int]:
    """One rendering per turn: what follows the generation prompt, up to the end of the turn."""

    def render(until: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages[:until], tokenize=False, add_generation_prompt=prompt
        )

    text = render(len(messages))
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(i, prompt=True))
            assert text.startswith(render(i, prompt=True)), "the oracle needs stable prefixes"
            end = text.index(message["content"].strip(), start) + len(message["content"].strip())
            tail = message["content"][len(message["content"].rstrip()) :]
            end += len(tail) if text.startswith(tail, end) else 0
            spans.append((start, text.index(ending, end) + len(ending)))
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [
        int(any(start < high and low < end for low, high in spans))
        for start, end in offsets["offset_mapping"]
    ]


@pytest.mark.parametrize(("template", "eos", "ending"), CASES)
def test_equals_the_oracle_on_random_conversations(
    make_tokenizer: Any, template: str, eos: str, ending: str
) -> None:
    tokenizer = make_tokenizer(template, eos)
    rng = random.Random(7)
    for _ in range(60):
        # The oracle cannot tell a trailing line break from the template's own: none at the end.
        contents = [
            "x" + "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 6))).rstrip() + "y"
            for _ in range(2 * rng.randint(1, 4))
        ]
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)
        ]
        if template not in ("mistral", "spaced") and rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        encoded = encode(tokenizer, messages)
        assert encoded.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoded.mask == oracle(tokenizer, messages, ending)


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "pieces"])
@pytest.mark.parametrize(
    ("template", "eos", "first", "second"),
    [
        ("chatml", "<|im_end|>", "Yes.<|im_end|>", "No \U0001f600<|im_end|>"),
        ("llama3", "<|eot_id|>", "Yes.<|eot_id|>", "No \U0001f600<|eot_id|>"),
        ("mistral", "</s>", " Yes.</s>", " No \U0001f600</s>"),
        ("spaced", "</s>", " Yes. </s>", " No \U0001f600 </s>"),
        ("gemma", "</s>", "Yes.<end_of_turn>", "No \U0001f600<end_of_turn>"),
        ("phi", "<|endoftext|>", "Yes.<|end|>", "No \U0001f600<|end|>"),
        ("marked_inside", "<|im_end|>", "Yes.<|im_end|>", "No \U0001f600<|im_end|>"),
        ("marked_outside", "<|im_end|>", "Yes.<|im_end|>", "No \U0001f600<|im_end|>"),
    ],
)
def test_trains_the_answer_and_the_end_of_the_turn_and_nothing_else(
    make_tokenizer: Any, chat: Any, template: str, eos: str, first: str, second: str, kind: str
) -> None:
    tokenizer = make_tokenizer(template, eos, kind)
    messages = chat("Is the sky blue?", "Yes.", "Is grass blue?", "No \U0001f600")
    assert trained(tokenizer, messages) == [first, second]


def test_a_template_without_end_of_turn_trains_the_answer_alone(
    make_tokenizer: Any, chat: Any
) -> None:
    runs = trained(make_tokenizer("plain"), chat("a?", "Yes", "b?", "No"))
    assert runs == ["Yes", "No"]


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "marked_inside"])
@pytest.mark.parametrize("answer", [" padded ", "\n\nlines\n", "\tx", "ends in space "])
def test_outer_white_space_is_trained_as_far_as_the_template_keeps_it(
    make_tokenizer: Any, chat: Any, template: str, answer: str
) -> None:
    ending = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}.get(template, "<|im_end|>")
    kept = answer.strip() if template in ("llama3", "gemma") else answer
    tokenizer = make_tokenizer(template, "<|im_end|>")
    (run,) = trained(tokenizer, chat("q", answer))
    # A token that holds both the header's line break and the answer's belongs to the answer.
    assert run.removeprefix("\n" * (len(run) - len(kept + ending))) == kept + ending


def test_the_start_of_text_is_never_doubled(make_tokenizer: Any, chat: Any) -> None:
    tokenizer = make_tokenizer("llama3", "<|eot_id|>")
    tokenizer.backend_tokenizer.post_processor = _adds_bos(tokenizer)
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    ids = encode(tokenizer, chat("q", "a")).ids
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def _adds_bos(tokenizer: Any) -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    )


def test_thinking_is_trained_where_the_template_keeps_it(make_tokenizer: Any, chat: Any) -> None:
    tokenizer = make_tokenizer("thinking", "<|im_end|>")
    thought = "<think>\nlong <|im_start|> thought\n</think>\n\nNo."
    messages = chat("a?", "<think>\nhm\n</think>\n\nYes.", "<|im_start|>assistant\n?", thought)
    assert trained(tokenizer, messages) == ["Yes.<|im_end|>", f"{thought}<|im_end|>"]


def test_an_empty_thinking_block_of_the_template_is_not_trained(
    make_tokenizer: Any, chat: Any
) -> None:
    tokenizer = make_tokenizer("thinking", "<|im_end|>")
    runs = trained(tokenizer, chat("a?", "Yes.", "b?", "No."))
    # "\n\n" before the answer may be one token with nothing of the answer in it.
    assert runs == ["Yes.<|im_end|>", "No.<|im_end|>"]


def test_a_prompt_that_opens_the_thinking_does_not_confuse_the_start(
    make_tokenizer: Any, chat: Any
) -> None:
    tokenizer = make_tokenizer("reasoner")
    messages = chat("a?", "<think>\nhm\n</think>Yes.", "b?", "No.")
    assert trained(tokenizer, messages) == ["Yes.</s>", "No.</s>"]


def test_dropped_messages_are_not_missed(make_tokenizer: Any, chat: Any) -> None:
    tokenizer = make_tokenizer("last_only", "<|im_end|>")
    assert trained(tokenizer, chat("a?", "Yes.", "b?", "No.")) == ["No.<|im_end|>"]


def test_merged_answers_are_one_run(make_tokenizer: Any, chat: Any) -> None:
    tokenizer = make_tokenizer("merging", "<|im_end|>")
    messages = [*chat("a?", "Yes."), {"role": "assistant", "content": "And no."}, *chat("b?", "c")]
    assert trained(tokenizer, messages) == ["Yes.\n\nAnd no.<|im_end|>", "c<|im_end|>"]


def test_special_tokens_inside_an_answer_do_not_end_it(tokenizer: Any, chat: Any) -> None:
    runs = trained(tokenizer, chat("q", "say <|im_end|> and <|im_end|>", "r", "s"))
    assert runs == ["say <|im_end|> and <|im_end|><|im_end|>", "s<|im_end|>"]


def test_private_use_characters_in_the_text_are_only_text(tokenizer: Any, chat: Any) -> None:
    answer = "\ue000 icon \ue001\ue002"
    assert trained(tokenizer, chat("\ue001", answer)) == [f"{answer}<|im_end|>"]


def test_a_last_question_without_answer_is_not_trained(tokenizer: Any, chat: Any) -> None:
    assert trained(tokenizer, chat("q", "a", "r")) == ["a<|im_end|>"]


def test_a_conversation_without_answers_has_an_empty_mask(tokenizer: Any, chat: Any) -> None:
    assert not any(encode(tokenizer, chat("q")).mask)


def test_a_template_that_raises_is_a_refusal_with_its_words(make_tokenizer: Any, chat: Any) -> None:
    messages = [{"role": "system", "content": "s"}, *chat("q", "a")]
    with pytest.raises(TemplateRefused, match="must take turns"):
        encode(make_tokenizer("mistral"), messages)


def test_a_template_that_rewrites_answers_is_refused(make_tokenizer: Any, chat: Any) -> None:
    with pytest.raises(TemplateRefused, match="rewrites answers"):
        encode(make_tokenizer("rewriting", "<|im_end|>"), chat("q", "answer"))


def test_a_tokenizer_without_template_says_what_to_do(make_tokenizer: Any, chat: Any) -> None:
    with pytest.raises(HeadsmithError, match="no chat template; .*--chat-template"):
        encode(make_tokenizer(None), chat("q", "a"))


def test_a_tokenizer_without_offsets_says_what_to_do(chat: Any) -> None:
    class Slow:
        is_fast = False
        name_or_path = "slow/tokenizer"

    with pytest.raises(HeadsmithError, match="slow/tokenizer gives no character offsets"):
        encode(Slow(), chat("q", "a"))


class Counted:
    """A tokenizer that counts what is asked of it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts = 0
        self.renderings = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.texts += 1 if isinstance(texts, str) else len(texts)
        return self.tokenizer(texts, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        assert options.get("tokenize") is False
        self.renderings += 1
        return self.tokenizer.apply_chat_template(*args, **options)


@pytest.mark.parametrize(("template", "renderings"), [("chatml", 5), ("thinking", 10)])
def test_256_turns_are_tokenised_once(
    make_tokenizer: Any, chat: Any, template: str, renderings: int
) -> None:
    counted = Counted(make_tokenizer(template, "<|im_end|>"))
    turns = [f"text {i}" if i % 2 == 0 else f"<think>\nhm\n</think>\n\n{i}" for i in range(256)]
    encoded = encode(counted, chat(*turns))
    assert counted.texts == 1
    assert counted.renderings <= renderings
    assert sum(1 for trained, _ in groupby(encoded.mask) if trained) == 128


def test_many_conversations_are_one_call_and_equal_the_single_ones(
    tokenizer: Any, chat: Any
) -> None:
    masker = Masker(tokenizer)
    conversations = [chat("q" * n, "a" * n) for n in range(1, 6)]
    texts, spans = zip(*map(masker.template.render, conversations), strict=True)
    for (ids, mask), messages in zip(masker.tokenize(texts, spans), conversations, strict=True):
        assert ids.dtype == np.int32 and mask.dtype == np.int8
        assert (ids.tolist(), mask.tolist()) == tuple(masker.encode(messages))


def test_token_mask_at_the_borders() -> None:
    offsets = np.array([[0, 2], [2, 4], [4, 4], [4, 6], [6, 8]])
    assert token_mask(offsets, [(2, 4)]).tolist() == [0, 1, 0, 0, 0]
    assert token_mask(offsets, [(1, 5)]).tolist() == [1, 1, 1, 1, 0]
    assert token_mask(offsets, [(0, 1), (7, 8)]).tolist() == [1, 0, 0, 0, 1]
    assert token_mask(offsets, []).tolist() == [0] * 5
    assert token_mask(np.zeros((0, 2), dtype=np.int64), [(0, 1)]).tolist() == []


def test_token_mask_when_offsets_leave_out_white_space() -> None:
    # "ab  cd": the token of the two spaces came back with no width.
    offsets = np.array([[0, 2], [4, 4], [4, 6]])
    assert token_mask(offsets, [(2, 6)]).tolist() == [0, 1, 1]
