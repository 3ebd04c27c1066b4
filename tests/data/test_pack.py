"""Packing: every document once, no row too long, no padding, the same on every run."""

from __future__ import annotations

import random

import datasets
import pytest
import torch

from headsmith.data.pack import make_row, pack
from headsmith.errors import HeadsmithError


@pytest.mark.parametrize("seed", range(20))
def test_every_document_is_in_exactly_one_row_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 130) for _ in range(rng.randint(1, 200))]
    rows = pack(lengths, 100)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert row == sorted(row)
        assert sum(lengths[i] for i in row) <= 100 or len(row) == 1
    assert rows == sorted(rows)
    assert rows == pack(lengths, 100)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_nearly_full(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(50, 2048) for _ in range(2000)]
    least = -(-sum(lengths) // 4096)
    # Best fit decreasing needs at most 11/9 of the optimum; on such lengths it is close to it.
    assert len(pack(lengths, 4096)) <= least + 2


def test_no_two_rows_could_be_one() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 100) for _ in range(300)]
    used = sorted(sum(lengths[i] for i in row) for row in pack(lengths, 100))
    assert used[0] + used[1] > 100


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([], []),
        ([10], [[0]]),
        ([10, 10], [[0, 1]]),
        ([21], [[0]]),
        ([20, 20], [[0], [1]]),
        ([5, 12, 8, 15], [[0, 3], [1, 2]]),
        ([25, 3, 4], [[0], [1, 2]]),
    ],
)
def test_small_cases(lengths: list[int], rows: list[list[int]]) -> None:
    assert pack(lengths, 20) == rows


@pytest.mark.parametrize("row_tokens", [0, -1])
def test_a_row_needs_room(row_tokens: int) -> None:
    with pytest.raises(HeadsmithError, match=f"row_tokens is {row_tokens}; it must be at least 1"):
        pack([1], row_tokens)


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_make_row_joins_documents_and_pads_nothing(form: str | None) -> None:
    dataset = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3], [4, 5, 6]], "loss_mask": [[0, 1], [1], [0, 0, 1]]}
    ).with_format(form)
    row = make_row(dataset, [2, 0])
    assert row.ids.dtype == torch.int64 and row.ids.tolist() == [4, 5, 6, 1, 2]
    assert row.mask.dtype == torch.bool and row.mask.tolist() == [False, False, True, False, True]
    assert row.lengths == [3, 2]
    assert row.documents.tolist() == [0, 0, 0, 1, 1]
    assert row.positions.tolist() == [0, 1, 2, 0, 1]
