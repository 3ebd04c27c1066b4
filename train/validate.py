"""Held-out prompts for the verifier, which says during training what the head is worth."""

from __future__ import annotations

import numpy as np

from headsmith.inference.evaluate import quick_tau
from headsmith.inference.metrics import Metrics
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request
from headsmith.inference.tree import parse_shape
from headsmith.models.heads import Head
from headsmith.models.target import Target
from headsmith.train.corpus import Corpus
from headsmith.train.recipe import ValidationSection, locate


def validation_requests(
    settings: ValidationSection, target: Target, corpus: Corpus
) -> list[Request]:
    """The prompts to validate on, at most `limit`, spread over their source; [] for none.

    Of a conversation with several turns the first is asked. Also checks `validation.draft`, so that
    a mistake shows before the training and not after it.
    """
    parse_shape(settings.draft)
    source = locate(settings.prompts) if settings.prompts else corpus.prepared.held_out
    if source is None:
        return []
    conversations = load_prompts(str(source))
    if len(conversations) > settings.limit:
        spread = np.linspace(0, len(conversations), settings.limit, endpoint=False)
        conversations = [conversations[int(i)] for i in spread]
    builder = RequestBuilder(target.tokenizer, target.max_context)
    return [builder.build(conversation) for conversation in conversations]


def validate(
    head: Head, target: Target, requests: list[Request], settings: ValidationSection
) -> Metrics:
    """METRICS of greedy speculative decoding on the requests."""
    shape = parse_shape(settings.draft)
    return quick_tau(target, head, requests, shape, settings.max_new_tokens)
