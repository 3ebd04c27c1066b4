"""`--plan`: what a recipe would run and what it takes, from the data and the target's config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from headsmith.errors import HeadsmithError
from headsmith.models import loading
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.heads import Head, read_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import MedusaConfig
from headsmith.models.target import Target
from headsmith.train.corpus import Corpus, load_corpus
from headsmith.train.medusa import CHUNK
from headsmith.train.recipe import Recipe, locate

FLOAT32 = 4
# Weights, gradients and AdamW's two moments.
COPIES_IN_TRAINING = 4
# Activations of a head row in units of its width, kept for the backward of one unroll step.
WIDTHS_PER_ROW = 16


@dataclass(slots=True)
class Plan:
    """The figures of a run; memory in bytes, for one rank."""

    target_parameters: int
    head_trained: int
    head_body: int
    draft_vocab: int
    taps: tuple[int, ...]
    corpus: Corpus
    saves: int
    checkpoint: int
    memory: dict[str, int]


class Sketch:
    """The shape of a target, with the names that `Target` gives it but without any weights."""

    default_taps = Target.default_taps

    def __init__(self, path: str, revision: str | None) -> None:
        place, extra = loading.locate(path)
        self.path = path
        try:
            config = AutoConfig.from_pretrained(place, revision=revision, **extra)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise HeadsmithError(f"target {path} has no config that loads: {reason}") from error
        self.config = config.get_text_config()
        self.whole_config = config
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.config.vocab_size
        self.num_layers = self.config.num_hidden_layers
        self.max_context = int(getattr(self.config, "max_position_embeddings", 0) or 2**30)

    @cached_property
    def parameters(self) -> int:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.whole_config)
        return sum(p.numel() for p in model.parameters())


def make_plan(recipe: Recipe) -> Plan:
    """Prepare the data and work out everything else without loading a weight.

    Raises HeadsmithError for whatever would stop the run itself: data, target, taps, vocabulary.
    """
    from headsmith.train.loop import save_steps

    sketch = Sketch(locate(recipe.target.path), recipe.target.revision)
    tokenizer = loading.load_tokenizer(locate(recipe.target.path), recipe.target.revision)
    corpus = load_corpus(recipe, tokenizer)
    head = _empty_head(recipe, sketch)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return Plan(
        target_parameters=sketch.parameters,
        head_trained=trained,
        head_body=trained - sum(p.numel() for n, p in head.named_parameters() if "lm_head" in n),
        draft_vocab=head.config.draft_vocab_size,
        taps=head.taps,
        corpus=corpus,
        saves=len(save_steps(recipe, corpus.batches.total_steps)),
        checkpoint=_checkpoint(head, trained, getattr(torch, recipe.target.dtype).itemsize),
        memory=estimate_memory(recipe, sketch, head, corpus),
    )


def estimate_memory(recipe: Recipe, sketch: Sketch, head: Head, corpus: Corpus) -> dict[str, int]:
    """Bytes by purpose on one rank, for its largest packed row; an estimate, not a bound."""
    batches = corpus.batches
    element = getattr(torch, recipe.target.dtype).itemsize
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    per_token = (len(head.taps) + 1) * sketch.hidden_size * element
    longest, total = max(batches.tokens), sum(batches.tokens)
    kept = total if recipe.data.keep_features == "memory" else longest
    loss_rows = int(batches.counts.sum(1).max())
    # The target's own forward keeps about one block's activations; the teacher one row block.
    prefix = longest * (8 * sketch.hidden_size + 3 * sketch.config.intermediate_size)
    return {
        "target": sketch.parameters * element,
        "head, gradients, AdamW": COPIES_IN_TRAINING * FLOAT32 * trained,
        "features": kept * per_token,
        "activations": FLOAT32 * (_head_activations(head, loss_rows) + prefix),
    }


def _checkpoint(head: Head, trained: int, element: int) -> int:
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


def print_plan(recipe: Recipe) -> None:
    """Print the plan of a recipe to stdout."""
    plan = make_plan(recipe)
    batches, info = plan.corpus.batches, plan.corpus.prepared.info
    total = batches.total_steps
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in (
        ("target", f"{recipe.target.path}, {plan.target_parameters:,} parameters, frozen"),
        ("head", f"{plan.head_trained:,} trained ({plan.head_body:,} without its lm_head)"),
        ("taps", ", ".join(map(str, plan.taps)) or "none, only the last state"),
        ("draft vocabulary", f"{plan.draft_vocab:,} ids"),
        ("conversations", f"{info['rows']:,}, {info['held_out']:,} held out"),
        *(("  not used", f"{n:,} {why}") for why, n in plan.corpus.prepared.counts.items()),
        ("packed rows", f"{len(batches.tokens):,} of up to {recipe.data.row_tokens:,} tokens"),
        ("tokens an epoch", f"{sum(batches.tokens):,}"),
        ("loss rows an epoch", _by_step(batches.counts.sum(0).tolist())),
        ("optimiser steps", f"{total:,} in {total / batches.steps_per_epoch:.3g} epochs"),
        ("tokens in all", f"{round(sum(batches.tokens) * total / batches.steps_per_epoch):,}"),
        (
            "checkpoints",
            f"{plan.saves} in {recipe.output.dir}, each {_size(plan.checkpoint)}",
        ),
        *((f"memory: {name}", _size(size)) for name, size in plan.memory.items()),
        ("memory: all, about", _size(sum(plan.memory.values()))),
    ):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _empty_head(recipe: Recipe, sketch: Any) -> Head:
    section = recipe.head
    if section.init_from is not None:
        return read_head(locate(section.init_from), sketch.num_layers)
    size = min(section.draft_vocab_size or sketch.vocab_size, sketch.vocab_size)
    if section.kind == "medusa":
        sizes = (section.num_heads, section.num_layers, section.lm_head)
        medusa = MedusaConfig(sketch.hidden_size, sketch.vocab_size, size, *sizes)
        with torch.device("meta"):
            return MedusaHead(medusa, torch.arange(size))
    config = Eagle3Config.for_target(
        sketch,
        size,
        taps=tuple(section.taps) if section.taps else None,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
    )
    with torch.device("meta"):
        return Eagle3Head(config, torch.arange(size))


def _by_step(counts: list[int]) -> str:
    return f"{counts[0]:,}" + (f" at step 0, {counts[-1]:,} at the last" if len(counts) > 1 else "")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
