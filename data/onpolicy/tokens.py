"""Answers of whoever continues token ids: prompts by the target's own template, texts of its ids.

The engine of this project and vLLM answer through here, so both are asked the same tokens and
their tokens are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headsmith.data.onpolicy.asking import Answer, Ask, Done, judged
from headsmith.data.onpolicy.thinking import Thinking, without_final_header
from headsmith.errors import HeadsmithError


class Prompt(NamedTuple):
    """Token ids to continue, and whose they are."""

    ask: Ask
    ids: list[int]


# Continues prompts in any order; calls back with each, its new ids, and whether a limit ended it.
Continue = Callable[[Sequence[Prompt], Callable[[Prompt, list[int], bool], None]], None]


@dataclass(slots=True)
class TokenAnswerer:
    """Answers by the target's `tokenizer` and what continues ids within `max_context` tokens.

    `template_args` are further variables of the chat template, such as enable_thinking.
    """

    proceed: Continue
    tokenizer: Any
    max_context: int
    thinking: Thinking
    template_args: Mapping[str, Any] = field(default_factory=dict)
    _special: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise HeadsmithError(
                f"the tokenizer of {self.tokenizer.name_or_path or 'the target'} has no chat "
                "template, so it cannot be asked; use an instruction-tuned target"
            )
        added = self.tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        special |= set(self.tokenizer.all_special_tokens)
        tokens = sorted(map(re.escape, special), key=len, reverse=True)
        self._special = re.compile("|".join(tokens) or r"(?!)")

    def answer(self, asks: Sequence[Ask], done: Done) -> None:
        """See `Answerer`."""
        prompts: list[Prompt] = []
        opened: dict[str, str] = {}
        for ask in asks:
            text = self._render(ask, done)
            if text is None:
                continue
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(ids) + 1 > self.max_context:
                said = f"a prompt of {len(ids)} tokens in a context of {self.max_context}"
                done(ask, Answer("too_long", detail=said))
                continue
            opened[ask.key] = self.thinking.opened_by(text)
            prompts.append(Prompt(ask, ids))

        def finished(prompt: Prompt, ids: list[int], cut: bool) -> None:
            begun = opened[prompt.ask.key]
            done(prompt.ask, judged(self._text(ids), begun, cut, self.thinking))

        if prompts:
            # Alike lengths together: a pass reads every cache up to the longest of its requests.
            self.proceed(sorted(prompts, key=lambda prompt: len(prompt.ids)), finished)

    def _render(self, ask: Ask, done: Done) -> str | None:
        """The prompt as the template writes it. Its special tokens are in it."""
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    ask.messages, add_generation_prompt=True, tokenize=False, **self.template_args
                )
            )
        except jinja2.TemplateError as fault:
            done(ask, Answer("template", detail=str(fault)))
            return None

    def _text(self, ids: list[int]) -> str:
        """What new ids say, with thinking tags and without other special tokens."""
        whole = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        text = without_final_header(whole)
        if text != whole or any(tag in text for pair in self.thinking.tags for tag in pair):
            tags = "|".join(re.escape(tag) for pair in self.thinking.tags for tag in pair)
            # Tags may be special tokens, or have some in them.
            pieces = re.split(f"({tags})", text)
            return "".join(
                piece if place % 2 else self._special.sub("", piece)
                for place, piece in enumerate(pieces)
            )
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
