"""The draft vocabulary: what is kept, in which order, and what it covers."""

from __future__ import annotations

import datasets
import pytest
import torch

from headsmith.data.vocabulary import count_dataset, count_ids, coverage, draft_vocabulary
from headsmith.errors import HeadsmithError


def test_only_trained_tokens_are_counted() -> None:
    ids = torch.tensor([[1, 1, 2], [3, 2, 2]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1]])
    counts = count_ids(ids, mask, 5)
    assert counts.dtype == torch.int64 and counts.tolist() == [0, 1, 3, 0, 0]
    assert count_ids(ids.int(), mask.bool(), 5).tolist() == [0, 1, 3, 0, 0]
    assert count_ids(ids, mask * 0, 5).tolist() == [0] * 5


@pytest.mark.parametrize("bad", [5, 900, -1])
def test_an_id_outside_the_vocabulary_is_another_tokenizer(bad: int) -> None:
    with pytest.raises(HeadsmithError, match=f"token id {bad}, but the target has 5 ids"):
        count_ids(torch.tensor([1, bad]), torch.tensor([1, 1]), 5)


def test_a_dataset_is_counted_like_its_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(50, (n,), generator=generator).tolist() for n in range(1, 60)]
    mask = [[i % 3 % 2 for i in row] for row in ids]
    dataset = datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": mask})
    flat = torch.tensor(sum(ids, [])), torch.tensor(sum(mask, []))
    assert torch.equal(count_dataset(dataset, 50), count_ids(*flat, 50))


@pytest.mark.parametrize("seed", range(10))
def test_invariants(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (200,), generator=generator) * torch.randint(0, 2, (200,))
    always = [199, 7, 7]
    kept = draft_vocabulary(counts, 60, always)
    assert kept.dtype == torch.int64 and len(kept) == 60
    assert torch.equal(kept, kept.unique(sorted=True))
    assert {7, 199} <= set(kept.tolist())
    d2t = kept - torch.arange(60)
    assert d2t[0] >= 0 and (d2t.diff() >= 0).all()
    t2d = torch.zeros(200, dtype=torch.bool)
    t2d[kept] = True
    assert torch.equal(t2d.nonzero().flatten(), torch.arange(60) + d2t)
    # Nothing left out is more frequent than what was kept by its count.
    by_count = kept[(kept != 7) & (kept != 199)]
    assert counts[~t2d].max() <= counts[by_count].min()
    # Among equals the lower id is kept.
    edge = counts[by_count].min()
    kept_at_edge, left_at_edge = (
        by_count[counts[by_count] == edge],
        (~t2d & (counts == edge)).nonzero(),
    )
    assert not len(left_at_edge) or kept_at_edge.max() < left_at_edge.min()


def test_small_cases() -> None:
    counts = torch.tensor([0, 5, 2, 2, 0, 9])
    assert draft_vocabulary(counts, 3).tolist() == [1, 2, 5]
    assert draft_vocabulary(counts, 3, [4]).tolist() == [1, 4, 5]
    assert draft_vocabulary(counts, 5).tolist() == [0, 1, 2, 3, 5]
    assert draft_vocabulary(counts, 6, [4]).tolist() == [0, 1, 2, 3, 4, 5]
    assert draft_vocabulary(torch.zeros(4, dtype=torch.int64), 2, [3]).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (0, [], "the draft vocabulary is 0; it must be from 1 to 4"),
        (5, [], "the draft vocabulary is 5; it must be from 1 to 4"),
        (1, [0, 1], "2 ids that end a turn must be in it"),
        (2, [4], "not all below 4"),
        (2, [-1], "not all below 4"),
    ],
)
def test_what_does_not_fit(size: int, always: list[int], message: str) -> None:
    with pytest.raises(HeadsmithError, match=message):
        draft_vocabulary(torch.ones(4, dtype=torch.int64), size, always)


def test_coverage() -> None:
    counts = torch.tensor([0, 5, 2, 2, 0, 1])
    assert coverage(counts, torch.tensor([1, 5])) == pytest.approx(0.6)
    assert coverage(counts, torch.arange(6)) == 1.0
    assert coverage(counts * 0, torch.tensor([1])) == 1.0
