"""Rows that another program has tokenised: `input_ids` and `loss_mask`, as long as each other.

speculators, SpecForge and others keep prepared data so. The mask is 1 on the tokens that the
target would have emitted, the end of each turn included, as in data that headsmith prepares.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import numpy as np

from headsmith.data.notes import Unused

# What a program that pads to one length leaves beside the ids.
ATTENTION = "attention_mask"


class TokenRow(NamedTuple):
    """`ids` int32 [T] and `mask` int8 [T] of 0 and 1."""

    ids: np.ndarray
    mask: np.ndarray


def is_tokens(record: object) -> TypeGuard[dict[str, object]]:
    """Whether a record of a source is token ids rather than messages."""
    return isinstance(record, dict) and "input_ids" in record


def token_row(record: dict[str, object], vocab_size: int) -> TokenRow:
    """The row of a record; Unused with the reason where it is none for this vocabulary."""
    ids = _integers(record, "input_ids")
    mask = _integers(record, "loss_mask")
    if len(ids) != len(mask):
        raise Unused("input_ids and loss_mask differ in length")
    if not np.isin(mask, (0, 1)).all():
        raise Unused("loss_mask has other numbers than 0 and 1")
    if record.get(ATTENTION) is not None and not _integers(record, ATTENTION).all():
        raise Unused(f"padded: {ATTENTION} leaves tokens out")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise Unused("a token id that the target's tokenizer does not have")
    return TokenRow(ids.astype(np.int32), mask.astype(np.int8))


def _integers(record: dict[str, object], name: str) -> np.ndarray:
    """A column as integers [T]; true and false are 1 and 0."""
    if name not in record:
        raise Unused(f"input_ids without {name}")
    given = record[name]
    try:
        found = np.asarray(given)
    except ValueError:  # lists of unequal lengths
        found = np.empty((0, 0))
    if found.size == 0 and found.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "biu":
        raise Unused(f"{name} is not a list of integers")
    return found.astype(np.int64)
