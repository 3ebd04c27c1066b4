"""What a run computes and how long that takes, from its recipe, its data and the target's shape.

Multiply-adds count as two operations. Attention scores and norms are left out; they are some
percent of the products with weights that are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headsmith.train.corpus import Corpus
from headsmith.train.kinds import KINDS
from headsmith.train.recipe import Recipe

# Operations a second that one GPU is assumed to sustain: a third of an H100's bfloat16 peak.
SUSTAINED = 3e14


@dataclass(frozen=True, slots=True)
class Work:
    """How much a run goes through; `exact` is false where only an upper bound is known.

    steps: optimiser steps, None where no bound is known. tokens: of all epochs. read: tokens that
    the target runs over. loss_rows: rows with a loss at unroll step 0. unrolled: rows with a loss
    over all unroll steps.
    """

    exact: bool
    steps: int | None
    tokens: int
    read: int
    loss_rows: int
    unrolled: int


def work_of(recipe: Recipe, corpus: Corpus | None) -> Work | None:
    """The work of a run over `corpus`; without one, what the recipe bounds it to, or None."""
    if corpus is None:
        return _bound(recipe)
    batches = corpus.batches
    epochs = batches.total_steps / batches.steps_per_epoch
    tokens = sum(batches.tokens)
    rows = [int(count) * epochs for count in batches.counts.sum(0)]
    kept = recipe.data.keep_features == "memory"
    times = 0.0 if recipe.data.features else min(1.0, epochs) if kept else epochs
    return Work(
        exact=True,
        steps=batches.total_steps,
        tokens=round(tokens * epochs),
        read=round(tokens * times),
        loss_rows=round(rows[0]),
        unrolled=round(sum(n * _unrolled_share(k, recipe) for k, n in enumerate(rows))),
    )


def _bound(recipe: Recipe) -> Work | None:
    data, train = recipe.data, recipe.train
    epoch = data.max_rows * data.max_length if data.max_rows else None
    bounds = [] if epoch is None else [epoch * train.epochs]
    if train.max_steps:
        bounds.append(train.max_steps * train.tokens_per_step)
    if not bounds:
        return None
    tokens = min(bounds)
    shares = sum(_unrolled_share(k, recipe) for k in range(recipe.steps))
    once = epoch is not None and data.keep_features == "memory"
    read = min(tokens, epoch) if once and epoch else tokens
    return Work(
        exact=False,
        steps=train.max_steps,
        tokens=tokens,
        read=0 if data.features else read,
        loss_rows=tokens,
        unrolled=round(tokens * shares),
    )


def _unrolled_share(step: int, recipe: Recipe) -> float:
    """The share of the run in which the unroll reaches 0-based `step`; see `TrainSection`. Medusa
    heads have no unroll that grows: all are trained from the first step on.
    """
    stages = recipe.steps - 1
    if stages == 0 or not KINDS[recipe.head.kind].unrolls:
        return 1.0
    return 1 - step * recipe.train.unroll_growth / stages


def active_parameters(model: Any, config: Any) -> int:
    """Weights of a (weightless) target that one token is multiplied with on its way to the last
    state: without embeddings and output head, of stacked experts as many as a token visits.
    """
    embedding = model.get_input_embeddings().weight
    visited = getattr(config, "num_experts_per_tok", None)
    count = 0
    for weight in model.get_decoder().parameters():
        if weight is embedding:
            continue
        # transformers stacks the experts of a block in weights [experts, out, in].
        stacked = visited is not None and weight.ndim == 3
        count += weight.numel() * visited // weight.shape[0] if stacked else weight.numel()
    return count


def operations(work: Work, active: int, head: int, teacher: int, drafts: int) -> float:
    """Floating-point operations of a run: the target's forward over what it reads, the teacher
    there (`teacher` weights of the output head, `drafts` of them for the draft vocabulary), forward
    and backward of the `head` weights that a row of one step meets, at every unrolled row.
    """
    return (
        2.0 * active * work.read
        + 2.0 * teacher * min(work.loss_rows, work.read)
        + (6.0 * head + 2.0 * drafts) * work.unrolled
    )
