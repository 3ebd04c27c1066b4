"""Token ids of a conversation and the mask of the tokens that the target would have emitted.

A conversation is tokenised once, as one text; the spans of `headsmith.data.template` are mapped
onto its tokens by character offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headsmith.data.read import Message
from headsmith.data.template import ChatTemplate, Span
from headsmith.errors import HeadsmithError


class Encoded(NamedTuple):
    """`ids` and `mask` [T]; mask is 1 on assistant tokens, the end-of-turn token included."""

    ids: list[int]
    mask: list[int]


class Masker:
    """Encodes conversations with one tokenizer; build it once and encode many.

    Raises HeadsmithError for a tokenizer without a chat template or without character offsets.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise HeadsmithError(
                f"the tokenizer of {tokenizer.name_or_path or 'the target'} gives no character "
                "offsets, which the loss mask needs; save it with its tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """See `encode`."""
        text, spans = self.template.render(messages)
        (ids, mask), *_ = self.tokenize([text], [spans])
        return Encoded(ids.tolist(), mask.tolist())

    def tokenize(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids (int32 [T]) and mask (int8 [T]) of each rendered text, in one tokenizer call."""
        encoded = self.tokenizer(
            list(texts),
            # The template has written the start-of-text token if the target wants one.
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            (np.array(ids, dtype=np.int32), token_mask(np.array(offsets, dtype=np.int64), where))
            for ids, offsets, where in zip(
                encoded["input_ids"], encoded["offset_mapping"], spans, strict=True
            )
        ]


def encode(tokenizer: Any, messages: Sequence[Message]) -> Encoded:
    """Ids and mask of one conversation, by the tokenizer's own chat template, tokenised once.

    Any template: generation markers are used where it has them. Raises TemplateRefused (a
    HeadsmithError) if the template does not render the conversation.
    """
    return Masker(tokenizer).encode(messages)


def token_mask(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """1 for every token that holds a character of a span: offsets int64 [T, 2] -> int8 [T].

    Spans are in order and do not overlap. A token whose offsets leave out white space before it
    (some tokenizers trim) is taken to hold it.
    """
    if not spans or not len(offsets):
        return np.zeros(len(offsets), dtype=np.int8)
    ends = offsets[:, 1]
    covered = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
    starts = np.minimum(offsets[:, 0], covered)
    where = np.array(spans, dtype=np.int64)
    # The first span that ends after the token starts is the only one the token can be in.
    nearest = np.searchsorted(where[:, 1], starts, side="right")
    begins = np.append(where[:, 0], np.iinfo(np.int64).max)
    return (begins[nearest] < ends).astype(np.int8)
