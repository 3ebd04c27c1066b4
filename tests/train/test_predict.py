"""The walk over an answer's right and wrong drafts, against decoding by hand."""

import pytest
import torch

from headsmith.train.predict import walk


@pytest.mark.parametrize(
    ("rows", "run", "expected"),
    [
        ([], [], (0, 0)),
        ([4], [0], (1, 1)),
        # Right twice, then the bonus: rows 4, 5 and 6 in one pass.
        ([4, 5, 6, 7], [2, 0, 0, 0], (4, 2)),
        # Two answers: the run of the first does not reach into the second.
        ([4, 5, 9, 10], [1, 0, 0, 0], (4, 3)),
        # A chain that is right to the end of the answer commits no bonus behind it.
        ([4, 5], [2, 1], (2, 1)),
    ],
)
def test_walk(rows: list[int], run: list[int], expected: tuple[int, int]) -> None:
    assert walk(torch.tensor(rows), torch.tensor(run)) == expected


def test_a_head_that_is_never_right_commits_one_token_a_pass() -> None:
    rows = torch.arange(3, 40)
    assert walk(rows, torch.zeros_like(rows)) == (37, 37)
