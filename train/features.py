"""The target's states of packed rows: computed when asked for, and kept if later epochs read them
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headsmith.errors import HeadsmithError
from headsmith.models.heads import Head
from headsmith.models.target import Target
from headsmith.train.batches import Batches
from headsmith.train.kinds import KINDS
from headsmith.train.unroll import TrainRow, prepare_row


@dataclass(slots=True)
class Features:
    """What `head` and its loss read of `target` in the rows of `batches`; `keep` holds every row in
    memory from the first time on.
    """

    target: Target
    head: Head
    batches: Batches
    keep: bool = False
    kept: dict[int, TrainRow] = field(default_factory=dict)

    def row(self, index: int) -> TrainRow:
        """Packed row `index`, on the target's device. HeadsmithError when a state of it is not
        finite.
        """
        if index in self.kept:
            return self.kept[index].to(self.target.device)
        prepared = prepare_row(
            self.target,
            self.head.draft_ids,
            self.batches.row(index),
            self.head.taps,
            self.batches.num_steps,
            self.batches.shared,
            KINDS[self.head.kind].reads_last,
        )
        if not (torch.isfinite(prepared.taps).all() and torch.isfinite(prepared.last).all()):
            raise HeadsmithError(
                f"the target's states of {self.batches.name(index)} hold NaN or infinity; try "
                "target.dtype=float32, or leave the conversation out"
            )
        if self.keep:
            self.kept[index] = prepared.to("cpu")
        return prepared
