"""From a recipe's data section to packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headsmith.data.prepare import Prepared, prepare
from headsmith.files import cache_dir
from headsmith.train.batches import Batches, make_batches
from headsmith.train.recipe import Recipe, locate


@dataclass(slots=True)
class Corpus:
    """The prepared conversations and the packed rows that a run makes of them."""

    prepared: Prepared
    batches: Batches


def load_corpus(recipe: Recipe, tokenizer: Any) -> Corpus:
    """Prepare the conversations, or find them prepared, and pack them.

    Raises HeadsmithError if there is nothing to train on.
    """
    data = recipe.data
    prepared = prepare(
        locate(data.source),
        tokenizer,
        Path(data.prepared_dir) if data.prepared_dir else cache_dir() / "prepared",
        max_length=data.max_length,
        max_rows=data.max_rows,
        held_out=recipe.validation.holdout,
        split=data.split,
        revision=data.revision,
    )
    return Corpus(prepared, make_batches(prepared.dataset, recipe))
