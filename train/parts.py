"""The parts of a run, each made from its section of the recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from headsmith import __version__
from headsmith.data.vocabulary import count_dataset, coverage, draft_vocabulary
from headsmith.errors import HeadsmithError
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.heads import Head, load_head
from headsmith.models.hub.pull import local_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.provenance import check_pair, target_info
from headsmith.models.target import Target
from headsmith.train.batches import Batches
from headsmith.train.corpus import Corpus
from headsmith.train.ranks import LIMIT
from headsmith.train.recipe import Recipe, locate
from headsmith.train.trackers import check_tracker


def make_accelerator(recipe: Recipe) -> Accelerator:
    """accelerate's view of this process; several processes on CPUs talk through gloo.

    Mixed precision is left to the recipe: the head is float32 and autocast is ours. How the head is
    shared out is ours too (`take_launch`), so accelerate only starts the processes.
    """
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    cpu = forced or not torch.cuda.is_available()
    return Accelerator(
        cpu=cpu,
        mixed_precision="no",
        log_with=check_tracker(recipe.output.tracker),
        project_dir=recipe.output.dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LIMIT)],
    )


def load_target(recipe: Recipe, device: torch.device, blocks: bool = True) -> Target:
    """The recipe's target; in shares where the recipe says so and there are several processes."""
    section = recipe.target
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return Target.load(
        locate(section.path),
        revision=section.revision,
        dtype=getattr(torch, section.dtype),
        device=device,
        blocks=blocks,
        sharded=several and section.parallel == "sharded",
    )


def runs_target(recipe: Recipe) -> bool:
    """Whether a run of the recipe needs the target's blocks: for its states, or to validate."""
    validation = recipe.validation
    return recipe.data.features is None or bool(validation.prompts or validation.holdout)


def new_head(recipe: Recipe, target: Target, corpus: Corpus, say: Callable[[str], None]) -> Head:
    """A fresh float32 head with a draft vocabulary from the data, for `begin` to begin, or the one
    to start from.
    """
    section = recipe.head
    if section.init_from is not None:
        path = str(local_head(locate(section.init_from)))
        # Another revision of the target is a fair start; another vocabulary is not.
        for warning in check_pair(target, path, allow_mismatch=True):
            say(f"warning: {warning}")
        head = load_head(path, target)
        check_start(recipe, head)
        if head.config.vocab_size != target.vocab_size:
            raise HeadsmithError(
                f"head.init_from {path} knows {head.config.vocab_size} ids and the target "
                f"{target.vocab_size}; start from a head of this target"
            )
        return head
    if section.kind == "medusa" and section.lm_head != "truncated":
        return fresh_medusa(recipe, target, None)
    counts = count_dataset(corpus.prepared.dataset, target.vocab_size)
    size = section.draft_vocab_size or target.vocab_size
    kept = draft_vocabulary(counts, size, target.always_drafted)
    share = coverage(counts, kept)
    say(f"vocabulary: {len(kept)} of {target.vocab_size} ids cover {share:.2%} of trained tokens")
    if section.kind == "medusa":
        return fresh_medusa(recipe, target, kept)
    return Eagle3Head.for_target(
        target,
        kept,
        taps=tuple(section.taps) if section.taps else None,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
        seed=recipe.train.seed,
        **section.sizes,
    )


def fresh_medusa(recipe: Recipe, target: Target, draft_ids: Tensor | None) -> MedusaHead:
    """Fresh Medusa heads; `draft_ids` for a truncated lm_head."""
    section = recipe.head
    return MedusaHead.for_target(
        target,
        draft_ids,
        num_heads=section.num_heads,
        num_layers=section.num_layers,
        lm_head=section.lm_head,
    )


def check_start(recipe: Recipe, head: Head) -> None:
    """HeadsmithError when the recipe asks for another head than the one in head.init_from, which
    decides its own shape, but not what the recipe trains.
    """
    _check_same_kind(recipe, head)
    if isinstance(head, Eagle3Head):
        _refuse_other_flags(recipe, head)


def _refuse_other_flags(recipe: Recipe, head: Eagle3Head) -> None:
    """HeadsmithError when the recipe asks for a flag that the head in init_from was made without.

    A head that is trained further keeps all of its flags; others would make it another head.
    """
    for flag in ("fc_norm", "norm_output"):
        if getattr(recipe.head, flag) and not getattr(head.config, flag):
            raise HeadsmithError(
                f"the recipe asks for {flag} (head.kind {recipe.head.kind}) and head.init_from "
                f"{recipe.head.init_from} is a head without it, which stays so; leave it out, or "
                "start a fresh head"
            )


def _check_same_kind(recipe: Recipe, head: Head) -> None:
    section, medusa = recipe.head, isinstance(head, MedusaHead)
    if medusa != (section.kind == "medusa"):
        raise HeadsmithError(
            f"head.init_from {section.init_from} holds a head of kind {head.kind} and head.kind is "
            f"{section.kind}; start from one of the same kind"
        )
    if isinstance(head, MedusaHead) and head.config.num_heads != section.num_heads:
        raise HeadsmithError(
            f"head.init_from {section.init_from} holds {head.config.num_heads} Medusa heads and "
            f"head.num_heads is {section.num_heads}; set head.num_heads={head.config.num_heads}"
        )


def keeps_features(recipe: Recipe, target: Target, head: Head, batches: Batches) -> bool:
    """Whether rows keep the target's states for later epochs; HeadsmithError if memory is short."""
    if recipe.data.keep_features != "memory" or batches.total_steps <= batches.steps_per_epoch:
        return False
    width = (len(head.taps) + 1) * target.hidden_size
    # Every rank of a machine comes to hold all rows: their order differs from epoch to epoch.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = sum(batches.tokens) * width * target.dtype.itemsize * ranks
    free = psutil.virtual_memory().available
    if needed > free:
        raise HeadsmithError(
            f"data.keep_features=memory needs {needed / 1e9:.1f} GB of memory and "
            f"{free / 1e9:.1f} GB are free; set data.keep_features=none"
        )
    return True


def provenance(recipe: Recipe, target: Target, head: Head, corpus: Corpus) -> dict[str, Any]:
    """What headsmith.json says of every checkpoint of a run: whose head it is and what made it."""
    info = corpus.prepared.info
    return {
        "schema": "headsmith.head/1",
        "headsmith": __version__,
        "target": target_info(target),
        "head": head.about(),
        "data": {
            "source": recipe.data.source,
            "fingerprint": corpus.prepared.fingerprint,
            **{key: info[key] for key in ("rows", "tokens", "trained_tokens", "held_out")},
        },
        "recipe": recipe.model_dump(mode="json"),
    }


def describe(corpus: Corpus, source: str) -> str:
    """One line: what of the data is trained on, what is not and why."""
    batches, info = corpus.batches, corpus.prepared.info
    text = (
        f"data: {info['rows']} conversations of {source} in {len(batches.tokens)} packed rows, "
        f"{info['tokens']} tokens, {int(batches.counts[:, 0].sum())} loss rows"
    )
    if info["held_out"]:
        text += f"; {info['held_out']} held out"
    unused = [f"{count} {reason}" for reason, count in corpus.prepared.counts.items()]
    if batches.dropped:
        unused.append(f"{batches.dropped} packed rows without a loss row")
    return text + (f"; not used: {', '.join(unused)}" if unused else "")
