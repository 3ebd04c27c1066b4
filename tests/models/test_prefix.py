"""States with a shared prefix are those of whole documents; what counts as shared."""

from pathlib import Path

import pytest
import torch

from headsmith.models.prefix import shared_length
from headsmith.models.target import Target


@pytest.mark.parametrize("own", [[5, 9, 3], [6, 6]], ids=["ragged", "equal lengths"])
def test_states_do_not_change(tiny_target_dir: Path, own: list[int]) -> None:
    target = Target.load(tiny_target_dir, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(0, 300, (11,), generator=generator)
    tails = [torch.randint(0, 300, (n,), generator=generator) for n in own]
    ids = torch.cat([torch.cat([prefix, tail]) for tail in tails])
    lengths = [11 + n for n in own]
    whole = target.features(ids, lengths, (2, 4, 5))
    for _ in range(2):
        split = target.features(ids, lengths, (2, 4, 5), shared=11)
        assert (whole.taps - split.taps).abs().max() < 1e-10
        assert (whole.last - split.last).abs().max() < 1e-10


def test_another_prefix_replaces_the_kept_one(tiny_target_dir: Path) -> None:
    target = Target.load(tiny_target_dir, dtype=torch.float64)
    for seed in (1, 2):
        ids = torch.randint(0, 300, (14,), generator=torch.Generator().manual_seed(seed))
        split, whole = (target.features(ids, [14], (2, 4, 5), shared=n) for n in (10, 0))
        assert (whole.last - split.last).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([[1] * 9 + [2], [1] * 9 + [3, 4]], 9),
        # One token of the shortest is left, for a span has at least one.
        ([[1] * 10, [1] * 12], 9),
        ([[1] * 5 + [2], [1] * 5 + [3]], 0),
        ([[1, 2, 3] * 4], 11),
    ],
)
def test_shared_length(documents: list[list[int]], expected: int) -> None:
    shortest = min(map(len, documents))
    assert shared_length(min(documents), max(documents), shortest) == expected
