"""`--plan`: what a recipe would run and what it takes, from the data and the target's config."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from headsmith.models.hub.pull import local_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import MedusaConfig
from headsmith.models.target import Target
from headsmith.train.begin import fitted_rows, is_fitted
from headsmith.train.corpus import Corpus, load_corpus
from headsmith.train.cost import SUSTAINED, Work, active_parameters, operations, work_of
from headsmith.train.launch import Launch, read_launch
from headsmith.train.memory import estimate_memory, of_checkpoint, peak
from headsmith.train.parts import check_start
from headsmith.train.recipe import Recipe, locate


@dataclass(slots=True)
class Plan:
    """The figures of a run of `launch`; memory in bytes, for one rank. `corpus` is None where the
    target is only a configuration: without a tokenizer there are no tokens to count.
    """

    launch: Launch
    target_parameters: int
    target_active: int
    head_trained: int
    head_body: int
    draft_vocab: int
    taps: tuple[int, ...]
    corpus: Corpus | None
    work: Work | None
    operations: float | None
    saves: int | None
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
    def model(self) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.whole_config)

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def active(self) -> int:
        return active_parameters(self.model, self.config)


def make_plan(recipe: Recipe, launch: Launch | None = None) -> Plan:
    """Prepare the data and work out everything else without loading a weight.
    `launch`: of this process, unless told.

    Raises HeadsmithError for whatever would stop the run itself: data, target, taps, vocabulary.
    Where the target is a folder with nothing but a config.json, the data is left alone and what
    depends on it is bounded by the recipe.
    """
    from headsmith.train.loop import save_steps

    launch = launch or read_launch()
    path = locate(recipe.target.path)
    sketch = Sketch(path, recipe.target.revision)
    bare = loading.is_bare(path)
    corpus = (
        None if bare else load_corpus(recipe, loading.load_tokenizer(path, recipe.target.revision))
    )
    head = _empty_head(recipe, sketch)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    work = work_of(recipe, corpus)
    reads_twice = recipe.data.keep_features == "none" and recipe.data.features is None
    if work and corpus and reads_twice and is_fitted(head, recipe.head):
        fitted = fitted_rows(recipe.head, head, corpus.batches)
        work = replace(work, read=work.read + sum(corpus.batches.tokens[row] for row in fitted))
    width, drafts = sketch.hidden_size, head.config.draft_vocab_size
    met = _weights_of_a_row(head, trained)
    body = trained - sum(p.numel() for n, p in head.named_parameters() if "lm_head" in n)
    return Plan(
        launch=launch,
        target_parameters=sketch.parameters,
        target_active=sketch.active,
        head_trained=trained,
        head_body=body,
        draft_vocab=drafts,
        taps=head.taps,
        corpus=corpus,
        work=work,
        operations=None
        if work is None
        else operations(work, sketch.active, met, sketch.vocab_size * width, drafts * width),
        saves=None if work is None or not work.steps else len(save_steps(recipe, work.steps)),
        checkpoint=of_checkpoint(head, trained, getattr(torch, recipe.target.dtype).itemsize),
        memory=estimate_memory(recipe, launch, sketch, head, corpus),
    )


def print_plan(recipe: Recipe) -> None:
    """Print the plan of a recipe to stdout; of several processes the first one does."""
    launch = read_launch()
    if launch.rank:
        return
    plan = make_plan(recipe, launch)
    memory = "memory" if launch.processes == 1 else "memory of each"
    rows = [
        *_launch_rows(recipe, launch),
        ("target", f"{recipe.target.path}, {plan.target_parameters:,} parameters, frozen"),
        ("  a token meets", f"{plan.target_active:,} of them, its embedding not counted"),
        ("head", f"{plan.head_trained:,} trained ({plan.head_body:,} without its lm_head)"),
        ("taps", ", ".join(map(str, plan.taps)) or "none, only the last state"),
        ("draft vocabulary", f"{plan.draft_vocab:,} ids"),
        *_data_rows(recipe, plan),
        *_work_rows(plan),
        *((f"{memory}: {name}", _size(size)) for name, size in plan.memory.items()),
        (f"{memory}: all, about", _size(peak(plan.memory))),
    ]
    if plan.saves is not None:
        each = _size(plan.checkpoint)
        rows.append(("checkpoints", f"{plan.saves} in {recipe.output.dir}, each {each}"))
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _launch_rows(recipe: Recipe, launch: Launch) -> list[tuple[str, str]]:
    if launch.processes == 1:
        return []
    shares = "whole in each" if launch.way == "replicated" else f"in shares ({launch.way})"
    target = "whole in each" if recipe.target.parallel == "replicated" else "in shares"
    text = f"{launch.processes}, the head {shares}, the target {target}"
    return [("processes", text)]


def _data_rows(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    if plan.corpus is None:
        unknown = f"not looked at: {recipe.target.path} holds a configuration and no tokenizer"
        return [("data", unknown)]
    batches, info = plan.corpus.batches, plan.corpus.prepared.info
    return [
        ("conversations", f"{info['rows']:,}, {info['held_out']:,} held out"),
        *(("  not used", f"{n:,} {why}") for why, n in plan.corpus.prepared.counts.items()),
        ("packed rows", f"{len(batches.tokens):,} of up to {recipe.data.row_tokens:,} tokens"),
        ("tokens an epoch", f"{sum(batches.tokens):,}"),
        ("loss rows an epoch", _by_step(batches.counts.sum(0).tolist())),
        ("epochs", f"{batches.total_steps / batches.steps_per_epoch:.3g}"),
    ]


def _work_rows(plan: Plan) -> list[tuple[str, str]]:
    work = plan.work
    if work is None or plan.operations is None:
        return [("tokens in all", "unknown: neither data nor train.max_steps nor data.max_rows")]
    most = "" if work.exact else "at most "
    hours = plan.operations / SUSTAINED / 3600
    rate = f"{SUSTAINED / 1e12:.0f} TFLOP/s (an assumption)"
    return [
        *([("optimiser steps", f"{most}{work.steps:,}")] if work.steps else []),
        ("tokens in all", f"{most}{work.tokens:,}"),
        ("operations", f"{most}{plan.operations:.2g} FLOP"),
        ("GPU-hours", f"{most}{hours:.3g} if one GPU sustains {rate}"),
    ]


def _empty_head(recipe: Recipe, sketch: Any) -> Head:
    section = recipe.head
    if section.init_from is not None:
        head = read_head(local_head(locate(section.init_from)), sketch.num_layers)
        check_start(recipe, head)
        return head
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
        **section.sizes,
    )
    with torch.device("meta"):
        return Eagle3Head(config, torch.arange(size))


def _weights_of_a_row(head: Head, trained: int) -> int:
    """Weights that a loss row of one step meets: all of an EAGLE head, one block of Medusa's and
    an lm_head.
    """
    if not isinstance(head, MedusaHead):
        return trained
    blocks = sum(p.numel() for p in head.blocks.parameters())
    config = head.config
    return blocks // config.num_heads + config.draft_vocab_size * config.hidden_size


def _by_step(counts: list[int]) -> str:
    return f"{counts[0]:,}" + (f" at step 0, {counts[-1]:,} at the last" if len(counts) > 1 else "")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
