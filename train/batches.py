"""The order in which packed rows are trained, fixed by the recipe alone.

Documents are packed once. Every epoch visits all rows in an order of its own, cut into optimiser
steps of nearly equal size, so the number of steps is known before the first one and the step number
is the whole data position: a resumed run needs nothing else to see the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headsmith.data.pack import Row, make_row, pack
from headsmith.errors import HeadsmithError
from headsmith.models.prefix import shared_length
from headsmith.train.recipe import Recipe
from headsmith.train.unroll import loss_rows


@dataclass(slots=True)
class Batches:
    """Packed rows and their order.

    documents[r]: dataset indices of the documents in row r. tokens[r]: their total length.
    counts[r, k]: rows of packed row r whose loss counts at unroll step k, int64 [R, K].
    shared: how many tokens all documents begin with.
    """

    dataset: Any
    documents: list[list[int]]
    tokens: list[int]
    counts: Tensor
    tokens_per_step: int
    seed: int
    epochs: int
    max_steps: int | None
    shared: int = 0
    dropped: int = 0

    @property
    def steps_per_epoch(self) -> int:
        wanted = round(sum(self.tokens) / self.tokens_per_step)
        return min(max(1, wanted), len(self.documents))

    @property
    def num_steps(self) -> int:
        """K: how many drafts ahead are trained."""
        return self.counts.shape[1]

    @property
    def total_steps(self) -> int:
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of a 0-based optimiser step."""
        return divmod(step, self.steps_per_epoch)

    def step_rows(self, step: int) -> list[int]:
        """The packed rows of a 0-based optimiser step, over all ranks."""
        epoch, index = self.position(step)
        return np.array_split(self.order(epoch), self.steps_per_epoch)[index].tolist()

    def order(self, epoch: int) -> Any:
        """All packed rows in the order of a 0-based epoch, int64 array [R]."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))

    def row(self, index: int) -> Row:
        return make_row(self.dataset, self.documents[index])

    def name(self, index: int) -> str:
        """What messages call packed row `index`."""
        documents = ", ".join(str(i) for i in self.documents[index][:8])
        return f"packed row {index} (conversations {documents} of the prepared data)"


def make_batches(dataset: Any, recipe: Recipe) -> Batches:
    """Pack the documents of a prepared dataset into the rows of a run.

    Rows without a single trained token are left out and counted in `dropped`.
    Raises HeadsmithError if that leaves nothing.
    """
    documents = [list(ids) for ids in dataset["input_ids"]]
    lengths = [len(ids) for ids in documents]
    rows = pack(lengths, recipe.data.row_tokens)
    packed = [make_row(dataset, row) for row in rows]
    counts = [[len(i) for i in loss_rows(row, recipe.steps)] for row in packed]
    used = [r for r, steps in enumerate(counts) if steps[0] > 0]
    if not used:
        raise HeadsmithError(
            f"none of the {len(dataset)} conversations of {recipe.data.source} has an assistant "
            "answer of two tokens or more to train on; look at them with `headsmith data inspect`"
        )
    return Batches(
        dataset=dataset,
        documents=[rows[r] for r in used],
        tokens=[len(packed[r].ids) for r in used],
        counts=torch.tensor([counts[r] for r in used], dtype=torch.int64),
        tokens_per_step=recipe.train.tokens_per_step,
        seed=recipe.train.seed,
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        shared=shared_length(min(documents), max(documents), min(lengths)),
        dropped=len(rows) - len(used),
    )


def share(
    rows: Sequence[int], rank: int, world: int, tokens: Sequence[int]
) -> list[tuple[int, float]]:
    """The (row, weight) pairs that one rank computes of a step's rows; tokens[r]: length of row r.

    Every rank gets equally many rows, since all must join each gradient exchange, and as nearly
    equally many tokens as that allows. Where the rows do not suffice, the shortest is computed
    again at weight zero.
    """
    turns = -(-len(rows) // world)
    places: list[list[int]] = [[] for _ in range(world)]
    held = [0] * world
    # Longest first, each to the rank with the fewest tokens that has a turn left.
    for row in sorted(rows, key=lambda row: (-tokens[row], row)):
        free = [r for r in range(world) if len(places[r]) < turns]
        least = min(free, key=lambda r: (held[r], r))
        places[least].append(row)
        held[least] += tokens[row]
    shortest = min(rows, key=lambda row: (tokens[row], row))
    mine = [(row, 1.0) for row in rows if row in places[rank]]
    return mine + [(shortest, 0.0)] * (turns - len(mine))
