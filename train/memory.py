"""What a run takes of the memory of one process, from shapes alone: the memory rows of `--plan`."""

from __future__ import annotations

from typing import Any

import torch

from headsmith.models import loading
from headsmith.models.eagle3_fit import inputs_of_fit
from headsmith.models.heads import Head
from headsmith.models.medusa_files import MedusaConfig
from headsmith.train.begin import is_fitted
from headsmith.train.corpus import Corpus
from headsmith.train.launch import Launch
from headsmith.train.medusa import CHUNK
from headsmith.train.recipe import Recipe

FLOAT32 = 4
# Float32 numbers a trained weight: (in every process, in shares). Alone: the weight, its gradient
# and AdamW's two moments; DDP sends a copy of the gradients. In shares: whole weights and gradients
# are there for the length of a row, all four are kept in shares, DeepSpeed's ZeRO-3 beside the
# weights that it trains.
COPIES = {
    "alone": (4, 0),
    "replicated": (5, 0),
    "fsdp2": (2, 4),
    "zero2": (2, 4),
    "zero3": (2, 5),
}
# Activations of a head row in units of its width, kept for the backward of one unroll step.
WIDTHS_PER_ROW = 16
FIT = "linear fit, before all below"


def estimate_memory(
    recipe: Recipe, launch: Launch, sketch: Any, head: Head, corpus: Corpus | None
) -> dict[str, int]:
    """Bytes by purpose on one rank, for its largest packed row; an estimate, not a bound. `sketch`:
    the target's shape (`headsmith.train.plan.Sketch`).
    """
    config, data = head.config, recipe.data
    element = getattr(torch, recipe.target.dtype).itemsize
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    whole, shared = COPIES[launch.way if launch.processes > 1 else "alone"]
    copies = whole + shared / launch.processes
    owns = getattr(config, "owns_embedding", False)
    table = config.vocab_size * config.hidden_size if owns else 0
    per_token = (len(head.taps) + 1) * sketch.hidden_size * element
    if corpus is None:
        longest, total = data.row_tokens, (data.max_rows or 0) * data.max_length
        loss_rows = longest * recipe.steps
    else:
        longest, total = max(corpus.batches.tokens), sum(corpus.batches.tokens)
        loss_rows = int(corpus.batches.counts.sum(1).max())
    kept = max(total, longest) if data.keep_features == "memory" else longest
    # The target's own forward keeps about one block's activations; the teacher one row block.
    inner = getattr(sketch.config, "intermediate_size", None) or 4 * sketch.hidden_size
    prefix = longest * (8 * sketch.hidden_size + 3 * inner)
    fit = _fit(recipe, head)
    return {
        "target": round(_target(recipe, launch, sketch) * element),
        **({FIT: fit} if fit else {}),
        "head, gradients, AdamW": round(FLOAT32 * (copies * trained + table)),
        "features": kept * per_token,
        "activations": FLOAT32 * (_head_activations(head, loss_rows) + prefix),
    }


def _target(recipe: Recipe, launch: Launch, sketch: Any) -> float:
    """Weights of the target that one process holds at a time."""
    if launch.processes == 1 or recipe.target.parallel == "replicated":
        return sketch.parameters
    blocks = loading.find_blocks(sketch.model.get_decoder(), sketch.num_layers)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    ends = sketch.parameters - sum(sizes)
    # The one that runs and the next one are whole.
    return ends + sum(sizes) / launch.local + 2 * max(sizes)


def _fit(recipe: Recipe, head: Head) -> int:
    """Bytes of the second moments in float64 and of their factors, 0 where nothing is fitted."""
    return 2 * 8 * inputs_of_fit(head.config) ** 2 if is_fitted(head, recipe.head) else 0


def peak(memory: dict[str, int]) -> int:
    """Bytes at the worst moment: the fit is over before training begins."""
    at_first = memory.get(FIT, 0)
    training = sum(memory.values()) - memory["target"] - at_first
    return memory["target"] + max(at_first, training)


def of_checkpoint(head: Head, trained: int, element: int) -> int:
    """Bytes of a checkpoint: float32 weights and two moments, and a shared lm_head's copy."""
    config = head.config
    copied = isinstance(config, MedusaConfig) and config.lm_head == "shared"
    return 3 * FLOAT32 * trained + copied * element * config.vocab_size * config.hidden_size


def _head_activations(head: Head, loss_rows: int) -> int:
    """Numbers that the head's forward and backward keep for so many loss rows of all steps."""
    config = head.config
    if isinstance(config, MedusaConfig):
        # Logits are there for one piece at a time, gradients of lm_heads for all heads.
        own = 0 if config.lm_head == "shared" else config.num_heads * config.hidden_size
        logits = (4 * CHUNK + own) * config.draft_vocab_size
        return logits + loss_rows * (4 * config.num_layers + 2) * config.hidden_size
    per_row = 3 * config.draft_vocab_size + WIDTHS_PER_ROW * config.hidden_size
    return loss_rows * (per_row + 3 * config.intermediate_size)
