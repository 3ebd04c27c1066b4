"""`--context N`: the same questions behind more conversation, so that lengths can be compared.

In front of the question come two messages: the user hands over texts, which are other prompts of
the same set, and the assistant thanks for them. The texts are cut between words so that the whole
prompt, chat template and system prompt included, is as long as it can be without passing N tokens.
The template itself and the question are never cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

from headsmith.errors import HeadsmithError
from headsmith.inference.prompts import Conversation, PromptTooLong, RequestBuilder

BEFORE = "Before my question, here is some text to look through:\n\n"
AFTER = "Thank you, I have looked through it. What is your question?"


def bring_to(
    conversations: Sequence[Conversation], builder: RequestBuilder, lengths: Sequence[int]
) -> tuple[list[Conversation], list[str]]:
    """Each first turn once for every length, as task `TASK@LENGTH`, and warnings.

    What is longer than the smallest length is left out of all of them, so that every length asks
    the same questions. HeadsmithError when nothing is left or a length does not fit the context.
    """
    if max(lengths) >= builder.max_context:
        raise HeadsmithError(
            f"context {max(lengths)} leaves no room for an answer: the target's context holds "
            f"{builder.max_context} tokens"
        )
    if len(conversations) < 2:
        raise HeadsmithError(
            "context takes what it puts before a prompt from the other prompts, and there is only "
            "one; give more prompts"
        )
    firsts = [replace(one, turns=one.turns[:1]) for one in conversations]
    texts = ["\n\n".join(one.turns) for one in conversations]
    short = [i for i, one in enumerate(firsts) if _size(one, builder) <= min(lengths)]
    if not short:
        raise HeadsmithError(
            f"every prompt is longer than context {min(lengths)}; ask for a longer one"
        )
    longer = [
        # The texts behind this prompt in the set, round and round, and never its own.
        _lengthen(firsts[i], [*texts[i + 1 :], *texts[:i]], builder, tokens)
        for tokens in lengths
        for i in short
    ]
    warnings = []
    if len(short) < len(firsts):
        warnings.append(
            f"{len(firsts) - len(short)} of {len(firsts)} prompts are longer than context "
            f"{min(lengths)} and left out"
        )
    return longer, warnings


def context_of(task: str) -> int:
    """The length that the task of a conversation from `bring_to` names."""
    return int(task.rpartition("@")[2])


def _lengthen(
    one: Conversation, texts: Sequence[str], builder: RequestBuilder, tokens: int
) -> Conversation:
    """`one` with as many words of `texts` before it as keep it within `tokens`."""
    # No word is less than a token, so this many words are enough.
    words = list(islice(chain.from_iterable(map(_words, cycle(texts))), tokens))
    fewest, most = 0, len(words)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if _size(_behind(one, words[:middle]), builder) <= tokens:
            fewest = middle
        else:
            most = middle - 1
    return replace(_behind(one, words[:fewest]), task=f"{one.task}@{tokens}")


def _words(text: str) -> list[str]:
    """Words with the white space behind them; the last ends a paragraph."""
    return re.findall(r"\S+\s*", text.strip() + "\n\n")


def _behind(one: Conversation, words: Sequence[str]) -> Conversation:
    if not words:
        return one
    system = bool(one.context) and one.context[0]["role"] == "system"
    given, rest = one.context[:system], one.context[system:]
    filler = (
        {"role": "user", "content": BEFORE + "".join(words).rstrip()},
        {"role": "assistant", "content": AFTER},
    )
    return replace(one, context=(*given, *filler, *rest))


def _size(one: Conversation, builder: RequestBuilder) -> int:
    """Tokens of the prompt; more than any context when it does not fit."""
    try:
        return len(builder.build(one).prompt_ids)
    except PromptTooLong:
        return builder.max_context
