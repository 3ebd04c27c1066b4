"""Held-out prompts for the verifier, which says during training what the head is worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headsmith.errors import HeadsmithError
from headsmith.inference.evaluate import quick_steps
from headsmith.inference.metrics import Metrics, summarise
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request, Steps
from headsmith.inference.tree import Calibrated, Chain, parse_shape
from headsmith.models.heads import Head
from headsmith.models.target import Target
from headsmith.train.corpus import Corpus
from headsmith.train.recipe import Recipe, ValidationSection, locate


def check_draft(recipe: Recipe) -> None:
    """HeadsmithError if the recipe's head cannot draft what it is to be validated with.

    Not a rule of the recipe's own, because reading one imports no torch.
    """
    try:
        shape = parse_shape(recipe.validation.draft)
    except HeadsmithError as error:
        raise HeadsmithError(f"validation.draft: {error}") from error
    if not (recipe.validation.prompts or recipe.validation.holdout):
        return
    medusa = recipe.head.kind == "medusa"
    if isinstance(shape, Calibrated) or (medusa and not isinstance(shape, Chain)):
        raise HeadsmithError(
            f"validation.draft: {shape} cannot be drafted by a head of kind {recipe.head.kind} in "
            "training; take a chain, for example chain:4"
        )
    if medusa and shape.depth > recipe.steps:
        raise HeadsmithError(
            f"validation.draft: {shape} goes {shape.depth} drafts deep and head.num_heads is "
            f"{recipe.steps}; draft no deeper than there are heads"
        )


def validation_requests(
    settings: ValidationSection, target: Target, corpus: Corpus
) -> list[Request]:
    """The prompts to validate on, at most `limit`, spread over their source; [] for none.

    Of a conversation with several turns the first is asked.
    """
    source = locate(settings.prompts) if settings.prompts else corpus.prepared.held_out
    if source is None:
        return []
    conversations = load_prompts(str(source))
    if len(conversations) > settings.limit:
        spread = np.linspace(0, len(conversations), settings.limit, endpoint=False)
        conversations = [conversations[int(i)] for i in spread]
    builder = RequestBuilder(target.tokenizer, target.max_context)
    return [builder.build(conversation) for conversation in conversations]


def answer(
    head: Head, target: Target, requests: list[Request], settings: ValidationSection
) -> list[Steps]:
    """What the passes of greedy speculative decoding did on some of the requests."""
    steps: list[Steps] = []
    if requests:
        shape = parse_shape(settings.draft)
        steps = quick_steps(target, head, requests, shape, settings.max_new_tokens)
    target.settle()
    return steps


def measured(shares: Sequence[list[Steps]], count: int) -> Metrics:
    """METRICS of all `count` requests, of which rank r answered every one from the r-th on."""
    return summarise([shares[i % len(shares)][i // len(shares)] for i in range(count)])
