"""`headsmith data capture`: the target runs once over a recipe's packed rows, into a feature store.

headsmith data capture RECIPE --out DIR                                this process alone
accelerate launch -m headsmith data capture RECIPE --out DIR           every process its shards
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState

from headsmith import __version__
from headsmith.data.capture import capture as fill
from headsmith.data.capture import capturing, check_room, clear_temporaries, plan, plan_shards
from headsmith.data.capture_server import server_states
from headsmith.data.capture_vllm import vllm_states
from headsmith.data.feature_codec import DType, Shape
from headsmith.data.feature_store import Store, check_shard
from headsmith.data.states import States, read_tokens
from headsmith.errors import HeadsmithError
from headsmith.models.target import Target
from headsmith.train.batches import Batches
from headsmith.train.corpus import Corpus, load_corpus
from headsmith.train.features import Computed, check_finite
from headsmith.train.launch import take_launch
from headsmith.train.parts import describe, load_target
from headsmith.train.progress import Report
from headsmith.train.ranks import LIMIT, together
from headsmith.train.recipe import Recipe
from headsmith.train.stored import about_store, taps_of


@dataclass(frozen=True, slots=True)
class Backend:
    """Who computes the states: `transformers` in this process, or `vllm`, which either runs under
    the interpreter `python`, on so many devices, or serves at the URL `server`.
    """

    name: Literal["transformers", "vllm"] = "transformers"
    python: str = "python3"
    devices: int = 1
    server: str | None = None


def capture(
    recipe: Recipe, out: Path, dtype: DType, shard_megabytes: float, backend: Backend | None = None
) -> Store:
    """Fill the store in `out` with the states that training by `recipe` reads; this process writes
    its share of the shards that are not there. Raises HeadsmithError for what a user can mend.
    """
    backend = backend or Backend()
    state = _state()
    _check_backend(backend, state)
    with together() as ranks, capturing(out, ranks.index):
        say = partial(print, file=sys.stderr) if ranks.first else _silent
        target = load_target(recipe, state.device, blocks=backend.name == "transformers")
        taps = taps_of(recipe, target)
        with ranks.first_goes_first():
            corpus = load_corpus(recipe, target.tokenizer)
            sizes = sizes_of(corpus.batches, Shape(len(taps), target.hidden_size, dtype))
            how = {"computed": f"{backend.name}, {recipe.target.dtype}", "dtype": dtype}
            store = plan(
                out,
                about_store(recipe, target, corpus, taps, **how),
                plan_shards(corpus.batches.order(0), sizes, shard_megabytes),
                _made(recipe, corpus),
            )
        say(describe(corpus, recipe.data.source))
        _say_size(store, sizes, sum(corpus.batches.tokens), say)
        if ranks.first:
            check_room(store, sizes)
        if target.shares is None:
            # From here on each works for itself, whatever becomes of the others.
            ranks.close()
        mine = range(len(store.shards))[ranks.index :: ranks.count]
        for shard in mine:
            clear_temporaries(store, shard)
        if not all(map(store.is_done, mine)):
            with _source(backend, target, corpus.batches, taps, recipe.data.max_length) as states:
                _fill(store, mine, states, corpus.batches, quiet=not ranks.first)
        target.settle()
    return store


@contextmanager
def _source(
    backend: Backend, target: Target, batches: Batches, taps: tuple[int, ...], longest: int
) -> Iterator[Callable[[int], States]]:
    """What gives the states of a packed row."""
    if backend.name == "transformers":
        yield Computed(target, batches, taps).states
        return
    if backend.server is not None:
        server = server_states(target, taps, backend.server)
        yield lambda row: check_finite(server.states(batches.row(row)), batches, row)
        return
    with vllm_states(target, taps, longest, backend.python, backend.devices) as worker:
        yield lambda row: check_finite(worker.states(batches.row(row)), batches, row)


def _check_backend(backend: Backend, state: PartialState) -> None:
    if backend.server is not None and backend.name != "vllm":
        raise HeadsmithError("--vllm-server is for --backend vllm; give both or neither")
    if backend.name == "vllm" and backend.server is None and state.num_processes > 1:
        raise HeadsmithError(
            "the vllm backend spreads over devices by itself (--vllm-devices); start it in one "
            "process, without accelerate launch"
        )


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
    store: Store, mine: range, states: Callable[[int], States], batches: Batches, *, quiet: bool
) -> None:
    """Write this process's shards, and show how far it is."""
    total = sum(len(store.shards[shard]) for shard in mine if not store.is_done(shard))
    counted = [0, 0]
    with Report(total, 0, quiet=quiet) as report:

        def progress(row: int, size: int) -> None:
            counted[0] += 1
            counted[1] += batches.tokens[row]
            report.show(counted[0], f"{counted[1]:,} tokens captured")

        fill(store, mine, states, progress)


def _state() -> PartialState:
    """accelerate's view of this process, however the launch would share out a head."""
    take_launch()
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    more = {"timeout": LIMIT} if int(os.environ.get("WORLD_SIZE", 1)) > 1 else {}
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
