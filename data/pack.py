"""Packed rows: several documents one after the other, their lengths kept, nothing padded."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headsmith.errors import HeadsmithError


@dataclass(slots=True)
class Row:
    """A packed row of T tokens.

    ids: int64 [T]. mask: bool [T], true on trained tokens. lengths: of its documents, sum T.
    """

    ids: Tensor
    mask: Tensor
    lengths: list[int]

    @property
    def documents(self) -> Tensor:
        """The document that each token belongs to, counted from 0: int64 [T]."""
        return torch.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))

    @property
    def positions(self) -> Tensor:
        """The position of each token in its document: int64 [T]."""
        return torch.cat([torch.arange(length) for length in self.lengths])


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Document indices of every row: no row above `row_tokens`, each document exactly once.

    Best fit, longest first: a document goes to the fullest row that still has room for it. A
    document longer than `row_tokens` gets a row of its own. Deterministic; the indices in a row
    are ascending and the rows are ordered by their first.
    """
    if row_tokens < 1:
        raise HeadsmithError(f"row_tokens is {row_tokens}; it must be at least 1")
    rows: list[list[int]] = []
    room: list[int] = []  # the distinct numbers of free tokens, ascending
    with_room: dict[int, list[int]] = {}  # rows by their number of free tokens
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        assert length > 0, "a document has tokens"
        fit = bisect_left(room, length)
        if fit < len(room):
            free = room[fit]
            row = with_room[free].pop()
            if not with_room[free]:
                del room[fit], with_room[free]
        else:
            row, free = len(rows), max(row_tokens, length)
            rows.append([])
        rows[row].append(document)
        free -= length
        if free:
            if free not in with_room:
                insort(room, free)
                with_room[free] = []
            with_room[free].append(row)
    return sorted(sorted(row) for row in rows)


def make_row(dataset: Any, indices: Sequence[int]) -> Row:
    """The packed row of the given documents of a prepared dataset, in the given order."""
    documents = dataset[list(indices)]
    ids = [np.asarray(document, dtype=np.int64) for document in documents["input_ids"]]
    mask = [np.asarray(document, dtype=bool) for document in documents["loss_mask"]]
    return Row(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(mask)),
        [len(document) for document in ids],
    )
