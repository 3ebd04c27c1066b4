"""The target's states of packed rows: computed when asked for or read from a feature store, and
kept if later epochs read them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from headsmith.data.capture import is_capturing
from headsmith.data.feature_codec import decode
from headsmith.data.feature_store import Store
from headsmith.data.states import States, states_of
from headsmith.errors import HeadsmithError
from headsmith.models.heads import Head
from headsmith.models.target import Target
from headsmith.train.batches import Batches
from headsmith.train.stages import stage
from headsmith.train.unroll import TrainRow, train_row

# How often a shard that is not there yet is looked for.
SECONDS_BETWEEN_LOOKS = 0.2


class Source(Protocol):
    """Where the target's states come from."""

    def states(self, index: int) -> States:
        """Of packed row `index`, in the target's dtype and on its device."""


@dataclass(slots=True)
class Computed:
    """States that the target computes when they are asked for."""

    target: Target
    batches: Batches
    taps: tuple[int, ...]

    def states(self, index: int) -> States:
        """One target pass. HeadsmithError when a state is not finite."""
        row = self.batches.row(index)
        with stage("target"):
            found = states_of(self.target, row, self.taps, self.batches.shared)
        return check_finite(found, self.batches, index)


@dataclass
class Stored:
    """States of a store that the recipe's own states would equal (`train.stored.check_store`)."""

    store: Store
    target: Target
    taps: tuple[int, ...]
    say: Callable[[str], None]

    @cached_property
    def places(self) -> list[int]:
        """Where the head's taps are among the stored ones."""
        return [self.store.about["taps"].index(tap) for tap in self.taps]

    def states(self, index: int) -> States:
        """As they were stored. Waits for a shard that is still being captured; HeadsmithError when
        nobody captures it, or it is damaged.
        """
        self.wait_for([index])
        found = self.store.read(index)
        return decode(found, self.places, self.target.dtype, self.target.device)

    def wait_for(self, rows: Sequence[int]) -> None:
        """Wait for the shards of some rows; see `states`."""
        for shard in dict.fromkeys(self.store.shard_of[row] for row in rows):
            if not self.store.is_done(shard):
                self._wait(shard)

    def _wait(self, shard: int) -> None:
        store = self.store
        name = store.file(shard).name
        self.say(
            f"features: waiting for {name}, {store.done} of {len(store.shards)} shards are captured"
        )
        while not store.is_done(shard):
            # Asked before the last look: a capture that ends now has written what it could.
            alive = is_capturing(store.folder)
            if not alive and not store.is_done(shard):
                raise HeadsmithError(
                    f"{store.folder} lacks {name} and no process is capturing it: {store.done} of "
                    f"{len(store.shards)} shards are there; run the same `headsmith data capture` "
                    "again, it goes on where it stopped"
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)


@dataclass(slots=True)
class Features:
    """What `head` and its loss read of `target` in the rows of `batches`; `source` says where it
    comes from (None: computed), `keep` holds every row in memory from the first time on.
    """

    target: Target
    head: Head
    batches: Batches
    keep: bool = False
    source: Source | None = None
    kept: dict[int, TrainRow] = field(default_factory=dict)

    def wait_for(self, rows: Sequence[int]) -> None:
        """Wait until all these rows are captured, which is how several processes wait for each
        other's: before a step, not within it.
        """
        if isinstance(self.source, Stored):
            self.source.wait_for(rows)

    def row(self, index: int) -> TrainRow:
        """Packed row `index`, on the target's device. HeadsmithError when a state of it is not
        finite.
        """
        if index in self.kept:
            return self.kept[index].to(self.target.device)
        if self.source is None:
            self.source = Computed(self.target, self.batches, self.head.taps)
        states, batches = self.source.states(index), self.batches
        prepared = train_row(batches.row(index), states, self.head.draft_ids, batches.num_steps)
        if self.keep:
            self.kept[index] = prepared.to("cpu")
        return prepared


def check_finite(states: States, batches: Batches, index: int) -> States:
    """The states as they are; HeadsmithError when one is not finite."""
    if not states.finite:
        raise HeadsmithError(
            f"the target's states of {batches.name(index)} hold NaN or infinity; try "
            "target.dtype=float32, or leave the conversation out"
        )
    return states
