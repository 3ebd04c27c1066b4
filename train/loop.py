"""Training a head, from the recipe to the finished checkpoint.

    accelerate launch -m headsmith.train quickstart/eagle3 train.epochs=2     one process or many
    headsmith train quickstart/eagle3 train.epochs=2                          this process alone

`train` reads in the order of the recipe: target, data, vocabulary, head, its beginning, optimiser,
loop, finish. What one optimiser step does is in `headsmith.train.step`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed

from headsmith.errors import HeadsmithError
from headsmith.inference.records import Request
from headsmith.models.heads import load_head
from headsmith.train import trackers
from headsmith.train.begin import begin
from headsmith.train.checkpoint import Run, join_run, open_run, random_state, restore_random_state
from headsmith.train.corpus import Corpus, load_corpus
from headsmith.train.features import Features
from headsmith.train.interrupt import Interrupt
from headsmith.train.kinds import loss_settings
from headsmith.train.launch import Way, take_launch
from headsmith.train.optimiser import build_optimisers
from headsmith.train.parallel import make_parallel
from headsmith.train.parts import (
    describe,
    keeps_features,
    load_target,
    make_accelerator,
    new_head,
    provenance,
    runs_target,
)
from headsmith.train.progress import Report
from headsmith.train.ranks import Ranks, together
from headsmith.train.recipe import Recipe
from headsmith.train.settle import settle
from headsmith.train.stages import whole_step
from headsmith.train.step import Stepper, Unroll
from headsmith.train.stored import stored_source
from headsmith.train.validate import answer, check_draft, measured, validation_requests


def train(recipe: Recipe, *, resume: bool | None = None, overwrite: bool = False) -> Path:
    """Run the recipe; return the checkpoint with the highest tau, or the last without validation.

    An interrupted run of the same recipe is continued. `resume=True` also continues another
    recipe's run, False refuses to; `overwrite` starts over. Ctrl-C and SIGTERM save and raise
    SystemExit(130 or 143). Raises HeadsmithError for what a user can mend.
    """
    check_draft(recipe)
    launch = take_launch()
    accelerator = make_accelerator(recipe)
    with together() as ranks:
        return _train(recipe, launch.way, accelerator, ranks, resume, overwrite)


def _train(
    recipe: Recipe,
    way: Way,
    accelerator: Accelerator,
    ranks: Ranks,
    resume: bool | None,
    overwrite: bool,
) -> Path:
    say = partial(accelerator.print, file=sys.stderr)
    set_seed(recipe.train.seed)

    target = load_target(recipe, accelerator.device, runs_target(recipe))
    with ranks.first_goes_first():
        corpus = load_corpus(recipe, target.tokenizer)
    say(describe(corpus, recipe.data.source))
    requests = validation_requests(recipe.validation, target, corpus)

    inputs = {"target": target.fingerprint(), "data": corpus.prepared.fingerprint}
    with ranks.first_goes_first():
        first = ranks.first
        run = open_run(recipe, inputs, resume, overwrite) if first else join_run(recipe, inputs)
    found = run.load()
    check_same_start(gather_object([found[1]["step"] if found else 0]), run)
    if first:
        run.rewind(found[1]["step"] if found else 0)

    head = load_head(found[0], target) if found else new_head(recipe, target, corpus, say)
    head.to(accelerator.device)
    batches = corpus.batches
    source = stored_source(recipe, target, head, corpus, say)
    ranks.meet()
    keep = keeps_features(recipe, target, head, batches)
    features = Features(target, head, batches, keep, source)
    if not found:
        begin(recipe.head, features, accelerator, say)
    optimisers = build_optimisers(head, recipe.train)
    unroll = Unroll(head, target, recipe.train, loss_settings(recipe))
    parallel = make_parallel(way, accelerator, unroll, optimisers, recipe.train.clip)
    model, optimisers = parallel.model, parallel.optimisers
    stepper = Stepper(accelerator, features, model, optimisers, recipe.train, parallel)
    trainer = Trainer(recipe, run, corpus, stepper, requests, ranks)
    if found:
        trainer.restore(found[1])
        say(f"continuing the run in {run.folder} after step {trainer.step}")
    trackers.start_tracker(accelerator, recipe)
    trainer.loop()
    accelerator.end_training()
    return trainer.finish()


@dataclass(slots=True)
class Trainer:
    """The loop over optimiser steps and what happens once in a while: log, save, validate, stop."""

    recipe: Recipe
    run: Run
    corpus: Corpus
    stepper: Stepper
    requests: list[Request]
    ranks: Ranks
    step: int = 0
    tokens: int = 0

    def loop(self) -> None:
        accelerator, total = self.stepper.accelerator, self.corpus.batches.total_steps
        main = accelerator.is_main_process
        saves = save_steps(self.recipe, total)
        settle()
        with Report(total, self.step, quiet=not main) as report, Interrupt() as interrupt:
            if self.step in saves:
                self.validate(report, interrupt)
            while self.step < total:
                self.stepper.features.wait_for(self.stepper.batches.step_rows(self.step))
                with whole_step():
                    record, stop = self.stepper.run(self.step, interrupt.number)
                self.step += 1
                self.tokens += record["tokens"]
                if main:
                    self.run.append("metrics.jsonl", record)
                trackers.log(accelerator, record, self.step)
                report.step(record)
                if self.step in saves or stop:
                    self.save()
                if stop:
                    report.say(
                        f"stopped after step {self.step} of {total}; the same command continues it"
                    )
                    raise SystemExit(128 + stop)
                if self.step in saves:
                    self.validate(report, interrupt)

    def save(self) -> None:
        """Write a checkpoint of this moment, the same for every way of sharing out the head; every
        rank adds its random state.
        """
        stepper = self.stepper
        states = gather_object([random_state()])
        optimisers = stepper.way.states()
        with stepper.way.whole():
            if self.ranks.first:
                state = {
                    "step": self.step,
                    "tokens": self.tokens,
                    "optimisers": optimisers,
                    "random": states,
                }
                about = provenance(self.recipe, stepper.target, stepper.head, self.corpus)
                about["training"] = {"step": self.step, "tokens": self.tokens}
                self.run.save(self.step, stepper.head, state, about)
            self.ranks.wait_for_first()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: optimisers, random states, position, logs."""
        accelerator = self.stepper.accelerator
        self.step, self.tokens = state["step"], state["tokens"]
        self.stepper.way.load(state["optimisers"])
        if len(state["random"]) == accelerator.num_processes:
            restore_random_state(state["random"][accelerator.process_index])

    def validate(self, report: Report, interrupt: Interrupt) -> None:
        """Let the verifier measure the checkpoint of this step, unless it has; log and keep tau.
        Every rank answers its share of the prompts.
        """
        stepper, first = self.stepper, self.ranks.first
        done = any(line["step"] == self.step for line in self.run.read("validation.jsonl"))
        # The first rank alone writes what the others would read here.
        if not self.requests or broadcast_object_list([done])[0]:
            return
        interrupt.deferred = False
        head, target = stepper.head, stepper.target
        if not stepper.way.runs_head:
            head = load_head(self.run.checkpoint(self.step), target, device=target.device)
        mine = self.requests[self.ranks.index :: self.ranks.count]
        steps = answer(head, target, mine, self.recipe.validation)
        self.ranks.meet()
        shares = gather_object([steps])
        if first:
            metrics = measured(shares, len(self.requests))
            best = self.run.validated(self.step, metrics)
            trackers.log(stepper.accelerator, {"validation": metrics}, self.step)
            report.say(
                f"step {self.step}  tau {metrics['tau']:.3f} on {len(self.requests)} held-out "
                f"prompts ({self.recipe.validation.draft}){', the best so far' if best else ''}"
            )
        self.ranks.wait_for_first()
        interrupt.deferred = True

    def finish(self) -> Path:
        """The checkpoint to use: the one with the highest tau, or the last one."""
        best = self.run.folder / "best"
        return best if best.exists() else self.run.folder / "latest"


def check_same_start(steps: Sequence[int], run: Run) -> None:
    """HeadsmithError when the processes found other checkpoints to continue from."""
    if len(set(steps)) > 1:
        raise HeadsmithError(
            f"the processes of this run see other checkpoints in {run.folder} (of the steps "
            f"{', '.join(map(str, steps))}); put output.dir on a disk that all machines share"
        )


def save_steps(recipe: Recipe, total: int) -> set[int]:
    """The steps after which a checkpoint is written; the last one is always among them."""
    every = recipe.output.save_every
    if every:
        return {*range(every, total + 1, every), total}
    times = recipe.validation.times
    return {max(1, round(total * i / times)) for i in range(1, times + 1)}
