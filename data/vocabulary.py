"""The draft vocabulary: the target ids that a head can propose, chosen by counting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headsmith.errors import HeadsmithError

_ROWS = 1024


def count_ids(ids: Tensor, mask: Tensor, vocab_size: int) -> Tensor:
    """How often each target id is trained: ids and mask of any equal shape -> int64 [V].

    Raises HeadsmithError for an id outside the vocabulary: the data are another tokenizer's.
    """
    kept = ids[mask.bool()]
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < vocab_size:
        outside = int(kept.max()) if int(kept.min()) >= 0 else int(kept.min())
        raise HeadsmithError(
            f"the data hold token id {outside}, but the target has {vocab_size} ids; "
            "prepare the data with this target's tokenizer"
        )
    return torch.bincount(kept, minlength=vocab_size)


def count_dataset(dataset: Any, vocab_size: int) -> Tensor:
    """`count_ids` over a whole prepared dataset, a block of rows at a time: int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for rows in dataset.with_format("numpy").iter(batch_size=_ROWS):
        ids = torch.from_numpy(np.concatenate(list(rows["input_ids"])))
        mask = torch.from_numpy(np.concatenate(list(rows["loss_mask"])))
        counts += count_ids(ids, mask, vocab_size)
    return counts


def draft_vocabulary(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` target ids to keep, ascending: counts int64 [V] -> int64 [Vd].

    `always` (end-of-text and end-of-turn ids) is kept first, then the most frequent, lower ids
    first where counts are equal; where fewer ids were seen, the smallest unused ids fill up.
    `size` equal to V keeps all. Raises HeadsmithError for a size or an id that does not fit.
    """
    vocab_size = len(counts)
    forced = sorted(set(always))
    if not 1 <= size <= vocab_size:
        raise HeadsmithError(f"the draft vocabulary is {size}; it must be from 1 to {vocab_size}")
    if len(forced) > size:
        raise HeadsmithError(
            f"the draft vocabulary is {size}, but {len(forced)} ids that end a turn must be in it"
        )
    if forced and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise HeadsmithError(f"the ids to keep, {forced}, are not all below {vocab_size}")
    rank = counts.clone()
    rank[forced] = torch.iinfo(rank.dtype).max
    order = torch.sort(rank, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, kept: Tensor) -> float:
    """The share of counted tokens whose id is in `kept`; 1 if nothing was counted."""
    total = int(counts.sum())
    return int(counts[kept].sum()) / total if total else 1.0
