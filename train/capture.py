"""`headsmith data capture`: the target runs once over a recipe's packed rows, into a feature store.

headsmith data capture RECIPE --out DIR                                this process alone
accelerate launch -m headsmith data capture RECIPE --out DIR           every process its shards
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from headsmith import __version__
from headsmith.data.capture import capture as fill
from headsmith.data.capture import capturing, check_room, plan, plan_shards
from headsmith.data.feature_codec import DType, Shape
from headsmith.data.feature_store import Store, check_shard
from headsmith.data.states import read_tokens
from headsmith.errors import HeadsmithError
from headsmith.train.batches import Batches
from headsmith.train.corpus import Corpus, load_corpus
from headsmith.train.features import Computed
from headsmith.train.parts import PATIENCE, describe, load_target
from headsmith.train.progress import Report
from headsmith.train.recipe import Recipe
from headsmith.train.stored import about_store, taps_of


def capture(recipe: Recipe, out: Path, dtype: DType, shard_megabytes: float) -> Store:
    """Fill the store in `out` with the states that training by `recipe` reads; this process writes
    its share of the shards that are not there. Raises HeadsmithError for what a user can mend.
    """
    ranks = _ranks()
    say = partial(print, file=sys.stderr) if ranks.is_main_process else _silent
    with capturing(out, ranks.process_index):
        target = load_target(recipe, ranks.device)
        taps = taps_of(recipe, target)
        with ranks.main_process_first():
            corpus = load_corpus(recipe, target.tokenizer)
            sizes = sizes_of(corpus.batches, Shape(len(taps), target.hidden_size, dtype))
            computed = f"transformers, {recipe.target.dtype}"
            how = {"computed": computed, "dtype": dtype}
            store = plan(
                out,
                about_store(recipe, target, corpus, taps, **how),
                plan_shards(corpus.batches.order(0), sizes, shard_megabytes),
                _made(recipe, corpus),
            )
        say(describe(corpus, recipe.data.source))
        _say_size(store, sizes, sum(corpus.batches.tokens), say)
        if ranks.is_main_process:
            check_room(store, sizes)
        source = Computed(target, corpus.batches, taps)
        mine = range(len(store.shards))[ranks.process_index :: ranks.num_processes]
        _fill(store, mine, source.states, corpus.batches, quiet=not ranks.is_main_process)
    return store


def check(folder: Path, say: Callable[[str], None]) -> None:
    """Compare every byte of a store with its checksums; HeadsmithError with all that is damaged."""
    store = Store.open(folder)
    faults: list[str] = []
    size = 0
    for shard in range(len(store.shards)):
        if store.is_done(shard):
            found = check_shard(store, shard)
            size += store.file(shard).stat().st_size if not found else 0
            faults += found
    for fault in faults:
        say(fault)
    if faults:
        raise HeadsmithError(
            f"{len(faults)} damaged parts in {folder}, the first: {faults[0]}; remove those shards "
            "and capture again: only they are made anew"
        )
    missing = len(store.shards) - store.done
    rest = f"; {missing} of {len(store.shards)} shards are not captured yet" if missing else ""
    say(f"{folder}: {store.done} shards, {size / 1e9:.3g} GB, all as they were written{rest}")


def sizes_of(batches: Batches, shape: Shape) -> list[int]:
    """Bytes that a store holds of every packed row."""
    rows = map(batches.row, range(len(batches.documents)))
    return [shape.nbytes(len(row.ids), len(read_tokens(row))) for row in rows]


def _fill(
    store: Store, mine: range, states: Callable[[int], Any], batches: Batches, *, quiet: bool
) -> None:
    """Write this process's shards, and show how far it is."""
    todo = [shard for shard in mine if not store.is_done(shard)]
    total = sum(len(store.shards[shard]) for shard in todo)
    counted = [0, 0]
    with Report(total, 0, quiet=quiet) as report:

        def progress(row: int, size: int) -> None:
            counted[0] += 1
            counted[1] += batches.tokens[row]
            report.show(counted[0], f"{counted[1]:,} tokens captured")

        fill(store, mine, states, progress)


def _ranks() -> PartialState:
    """The processes of this launch; alone without one. They only meet at the beginning."""
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    more = {"timeout": PATIENCE} if int(os.environ.get("WORLD_SIZE", 1)) > 1 else {}
    return PartialState(cpu=forced or not torch.cuda.is_available(), **more)


def _say_size(store: Store, sizes: list[int], tokens: int, say: Callable[[str], None]) -> None:
    say(
        f"features: {sum(sizes) / 1e9:.3g} GB in {len(store.shards)} shards, "
        f"{sum(sizes) / tokens:.0f} bytes a token ({store.about['dtype']}); {store.done} are there"
    )


def _made(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    return {
        "headsmith": __version__,
        "target": recipe.target.path,
        "revision": recipe.target.revision,
        "source": recipe.data.source,
        "packed_rows": len(corpus.batches.documents),
        "tokens": sum(corpus.batches.tokens),
    }


def _silent(line: str) -> None:
    """What ranks but the first say."""
