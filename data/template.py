"""Where the assistant speaks in the text that a chat template makes of a conversation.

No template's strings are known here. The template is asked instead: markers that no conversation
holds are put around the answers, the conversation is rendered, and the markers show where the
answers went. A marked rendering counts only if, without its markers, it equals the plain one, so
a template that trims, drops or rewrites answers is noticed. Every conversation takes a handful
of renderings, whatever its number of turns, and none of them is tokenised.

Spans are (start, end) offsets in characters. A span runs from where the generation prompt ends to
the end of the token that ends the turn, because that is what the target emits: the role header
before it and the line break after it are written by the template.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from jinja2 import TemplateError

from headsmith.data.read import Message
from headsmith.errors import HeadsmithError

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTION = {"role": "user", "content": "Question"}
_SYSTEM = {"role": "system", "content": "System"}


class TemplateRefused(HeadsmithError):
    """The chat template cannot render this conversation, or hides where the answers are."""


class ChatTemplate:
    """The chat template of a tokenizer; `render` gives a conversation's text and answer spans.

    Raises HeadsmithError if the tokenizer has no template, TemplateRefused if the template does
    not even render a question and its answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise HeadsmithError(
                f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template; "
                "use an instruction-tuned target or give a template with --chat-template FILE"
            )
        self.tokenizer = tokenizer
        self.source: str = tokenizer.get_chat_template()
        self._has_generation_blocks = bool(_GENERATION.search(self.source))
        self._specials = tokenizer.special_tokens_map
        self._endings: tuple[str, ...] = ()
        self._terminator: re.Pattern[str] | None = None
        self._opening = ""
        self._gap = ""
        self._probe()

    def render(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The conversation as text, and the spans that the assistant emits, in order.

        Raises TemplateRefused with the reason.
        """
        if self._has_generation_blocks:
            text, spans = self._generation_blocks(messages)
            # Some templates put the end of the turn inside the block, some after it.
            spans = [
                (s, e if self._ended(text, e) else self._past_ending(text, e)) for s, e in spans
            ]
        else:
            text = self._text(messages)
            marked = self._marked(messages, text)
            found = self._rewritten(messages, text) if marked is None else marked
            spans = [(self._widen(text, s), self._past_ending(text, e)) for s, e in found]
        return text, self._joined(text, [(start, end) for start, end in spans if start < end])

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the assistant's next answer begins."""
        return self._text(messages, prompt=True)

    # Asking the template about itself

    def _probe(self) -> None:
        """Learn what opens and what ends a turn from one question and its marked answer."""
        left, right = _markers("")
        answer = {"role": "assistant", "content": f"{left}Answer{right}"}
        head = [_QUESTION]
        try:
            answered = self._text([*head, answer])
        except TemplateRefused:
            head = [_SYSTEM, _QUESTION]
            answered = self._text([*head, answer])
        prompt = self._text(head, prompt=True)
        self._opening = prompt.removeprefix(self._text(head))
        before, _, after = answered.partition(left)
        gap = before.removeprefix(prompt)
        # White space that the template puts before an answer is emitted by the target, as in
        # "[/INST] answer"; anything else there (an empty thinking block) is the template's own.
        self._gap = gap if before.startswith(prompt) and gap.isspace() else ""
        self._learn_endings(after.partition(right)[2])

    def _learn_endings(self, tail: str) -> None:
        tokenizer = self.tokenizer
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        tokens = {token for token in added | set(tokenizer.all_special_tokens) if token.strip()}
        tokens -= {tokenizer.bos_token} - {tokenizer.eos_token}
        found = _leading(tokens).match(tail) if tokens else None
        endings = {found.group(1)} if found else set()
        if tokenizer.eos_token:
            endings.add(tokenizer.eos_token)
        self._endings = tuple(sorted(endings))
        self._terminator = _leading(endings) if endings else None

    # Spans

    def _generation_blocks(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        # What apply_chat_template(return_assistant_tokens_mask=True) calls, without tokenising.
        from transformers.utils.chat_template_utils import render_jinja_template

        with _Refusals():
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **self._specials,
            )
        return texts[0], [tuple(span) for span in spans[0]]

    def _marked(self, messages: Sequence[Message], text: str) -> list[Span] | None:
        """Spans of answers that the template inserts as they are, or trimmed on either side."""
        left, right = _markers(text)
        for trimmed in product((False, True), (False, True)):
            marked = _mark(messages, left, right, trimmed)
            plain, starts, ends = _unmark(self._text(marked), left, right)
            in_order = len(starts) == len(ends) and all(map(int.__le__, starts, ends))
            if plain == text and in_order:
                return list(zip(starts, ends, strict=True))
        return None

    def _rewritten(self, messages: Sequence[Message], text: str) -> list[Span]:
        """Spans of answers whose beginning the template rewrites (it drops or moves thinking).

        The end of an answer is still found by a marker. Its start is where the text parts from a
        rendering with other answers, or where the generation prompt ends if that comes first.
        """
        ends = self._ends(messages, text)
        left, _ = _markers(text)
        blank = [{**m, "content": left} if m["role"] == "assistant" else m for m in messages]
        gaps = self._text(blank).split(left)[:-1]
        if len(gaps) != len(ends):
            raise TemplateRefused("the chat template rewrites answers")
        spans: list[Span] = []
        previous = 0
        for gap, end in zip(gaps, ends, strict=True):
            shared = os.path.commonprefix([text[previous:end], gap])
            opened = shared.rfind(self._opening) if self._opening and shared != gap else -1
            start = previous + (opened + len(self._opening) if opened >= 0 else len(shared))
            if start >= end:
                raise TemplateRefused("the chat template rewrites answers")
            spans.append((start, end))
            previous = end
        return spans

    def _ends(self, messages: Sequence[Message], text: str) -> list[int]:
        left, right = _markers(text)
        for trimmed in (False, True):
            marked = _mark(messages, "", right, (False, trimmed))
            plain, _, ends = _unmark(self._text(marked), left, right)
            if plain == text:
                return ends
        raise TemplateRefused("the chat template rewrites answers")

    def _widen(self, text: str, start: int) -> int:
        return start - len(self._gap) if self._gap and text.endswith(self._gap, 0, start) else start

    def _past_ending(self, text: str, end: int) -> int:
        found = self._terminator.match(text, end) if self._terminator else None
        return found.end() if found else end

    def _joined(self, text: str, spans: list[Span]) -> list[Span]:
        """Spans with answers joined that the template merges into one turn, white space between."""
        joined: list[Span] = []
        for start, end in spans:
            last = joined[-1] if joined else None
            if last and text[last[1] : start].isspace() and not self._ended(text, last[1]):
                joined[-1] = (last[0], end)
            else:
                joined.append((start, end))
        return joined

    def _ended(self, text: str, end: int) -> bool:
        # Only a little of a long text is looked at, so that many turns stay cheap.
        reach = max(map(len, self._endings), default=0) + 32
        return text[max(end - reach, 0) : end].rstrip().endswith(self._endings)

    def _text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        with _Refusals():
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )


class _Refusals:
    """Turns whatever a template raises into TemplateRefused."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (TemplateError, TypeError, ValueError, LookupError, AttributeError)):
            raise TemplateRefused(f"the chat template refuses: {error}") from error


def _markers(text: str) -> tuple[str, str]:
    """Two characters that `text` does not hold, from Unicode's private use area."""
    unused = (char for char in map(chr, range(0xE000, 0xF900)) if char not in text)
    return next(unused), next(unused)


def _mark(
    messages: Sequence[Message], left: str, right: str, trimmed: tuple[bool, bool]
) -> list[Message]:
    """Answers with `left` and `right` around them, inside their outer white space if trimmed."""
    marked = []
    for message in messages:
        if message["role"] == "assistant":
            content = message["content"]
            start = len(content) - len(content.lstrip()) if trimmed[0] else 0
            end = len(content.rstrip()) if trimmed[1] else len(content)
            content = content[:start] + left + content[start:end] + right + content[end:]
            message = {**message, "content": content}
        marked.append(message)
    return marked


def _unmark(text: str, left: str, right: str) -> tuple[str, list[int], list[int]]:
    """`text` without its markers, and the offsets in it where they stood."""
    places: dict[str, list[int]] = {left: [], right: []}
    pieces = []
    length = 0
    for piece in re.split(f"([{left}{right}])", text):
        if piece in places:
            places[piece].append(length)
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), places[left], places[right]


def _leading(tokens: set[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})")
