"""A recipe and its feature store: whose states the recipe needs, and whether a store has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headsmith.data.capture import is_capturing, rows_sha256
from headsmith.data.feature_store import INFO, WORDS, Store, difference
from headsmith.errors import HeadsmithError
from headsmith.models.heads import Head, read_head
from headsmith.models.hub.pull import local_head
from headsmith.models.target import Target
from headsmith.train.corpus import Corpus
from headsmith.train.features import SECONDS_BETWEEN_LOOKS, Stored
from headsmith.train.recipe import Recipe, locate

# What may differ: a store that was computed or rounded otherwise still is of this recipe, and one
# with more taps has those of this head.
FREE = ("computed", "dtype", "taps")


def about_store(
    recipe: Recipe, target: Target, corpus: Corpus, taps: tuple[int, ...], **how: str
) -> dict[str, Any]:
    """Whose states a store of this recipe holds; `how`: computed, dtype."""
    batches = corpus.batches
    return {
        "target": target.fingerprint(),
        **how,
        "taps": list(taps),
        # Tap i is the residual stream before block i, as it is (spec/eagle.md 1.1).
        "tap_norm": "none",
        "last_norm": "final",
        "width": target.hidden_size,
        "data": corpus.prepared.fingerprint,
        "row_tokens": recipe.data.row_tokens,
        "rows": rows_sha256(map(batches.row, range(len(batches.documents)))),
    }


def taps_of(recipe: Recipe, target: Target) -> tuple[int, ...]:
    """The taps that the recipe's head reads; none for Medusa heads."""
    section = recipe.head
    if section.init_from is not None:
        return tuple(read_head(local_head(locate(section.init_from)), target.num_layers).taps)
    if section.kind == "medusa":
        return ()
    return tuple(section.taps) if section.taps else target.default_taps()


def stored_source(
    recipe: Recipe, target: Target, head: Head, corpus: Corpus, say: Callable[[str], None]
) -> Stored | None:
    """The recipe's store as a source of states; None without `data.features`.

    Waits for the index of a capture that has just begun. HeadsmithError when there is no store, or
    one of other states.
    """
    if recipe.data.features is None:
        return None
    folder = Path(recipe.data.features)
    if not (folder / INFO).is_file() and is_capturing(folder):
        say(f"features: waiting for the capture into {folder} to begin")
        while not (folder / INFO).is_file() and is_capturing(folder):
            time.sleep(SECONDS_BETWEEN_LOOKS)
    store = Store.open(folder)
    check_store(store, about_store(recipe, target, corpus, head.taps))
    say(f"features: {store.done} of {len(store.shards)} shards in {folder}, {store.about['dtype']}")
    return Stored(store, target, head.taps, say)


def check_store(store: Store, wanted: dict[str, Any]) -> None:
    """HeadsmithError with the difference when a store is not of the states that are wanted."""
    keys = [key for key in WORDS if key not in FREE]
    other = difference(store.about, wanted, keys)
    missing = [tap for tap in wanted["taps"] if tap not in store.about["taps"]]
    if other is None and missing:
        other = f"the head reads tap {missing[0]} and the taps there are {store.about['taps']}"
    if other:
        raise HeadsmithError(
            f"the features in {store.folder} are not of this recipe: {other}; capture them again "
            "with this recipe, or set data.features=null"
        )
