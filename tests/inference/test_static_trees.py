"""Fixed trees of ranks: from a file, and filled by a head that reads its own drafts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.records import Request
from headsmith.inference.tree import Chain, Draft, DynamicTree, RankTree, Tree, parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

EVERY = RankTree(
    tuple(path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth))
)


def test_a_file_of_rank_paths(write: Callable[[str, str], Path]) -> None:
    paths = [[0, 1], [1], [0]]
    expected = RankTree(((0,), (1,), (0, 1)))
    assert parse_shape(f"static:{write('a.json', json.dumps(paths))}") == expected
    stored = write("b.json", json.dumps({"medusa_choices": paths, "accuracy": []}))
    assert parse_shape(f"static:{stored}") == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[0], [0, 1", "cannot be read"),
        ("{}", "is no list of lists of ranks"),
        ("[]", "is no list of lists of ranks"),
        ("[[]]", "is no list of lists of ranks"),
        ("[[0], [-1]]", "is no list of lists of ranks"),
        ("[[0], [true]]", "is no list of lists of ranks"),
        ("[[0], 1]", "is no list of lists of ranks"),
        ("[[0], [1, 0]]", r"has \[1, 0\] without the path to it"),
        ("[[0], [0]]", "has a path twice"),
    ],
)
def test_files_that_hold_no_tree(
    text: str, sentence: str, write: Callable[[str, str], Path]
) -> None:
    with pytest.raises(HeadsmithError, match=sentence) as fault:
        parse_shape(f"static:{write('tree.json', text)}")
    assert "\n" not in str(fault.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="cannot be read"):
        parse_shape(f"static:{tmp_path / 'none.json'}")
    with pytest.raises(HeadsmithError, match="nor static:FILE"):
        parse_shape("static:")


def paths_of(tree: Tree) -> dict[tuple[int, ...], int]:
    """Tokens from the root to each node."""
    rows = (row.nonzero().flatten().tolist() for row in tree.ancestors)
    return {tuple(tree.tokens[i] for i in row): node for node, row in enumerate(rows)}


def test_ranks_are_those_of_a_beam_search(
    small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    """The tree of every rank holds each tree that a beam of as many ranks keeps."""

    def drafted(shape: Draft) -> list[Tree]:
        drafter = EagleDrafter(head, small_target, shape)
        drafter.reset(2, 80)
        updates = []
        for slot, request in enumerate(requests[:2]):
            ids = torch.tensor(request.prompt_ids)
            taps = small_target.features(ids, [len(ids)], head.taps).taps.clone()
            updates.append(Update(slot, [*request.prompt_ids[1:], 7], taps))
        return drafter.propose(updates)

    beams, chains = drafted(DynamicTree(99, 3, 3)), drafted(Chain(3))
    for every, beam, chain in zip(drafted(EVERY), beams, chains, strict=True):
        paths = paths_of(every)
        assert len(paths) == 1 + 3 + 9 + 27
        assert set(paths_of(beam)) < set(paths)
        # Rank 0 all along is the chain.
        assert [every.tokens[n] for n in (0, 1, 4, 13)] == chain.tokens


@pytest.mark.parametrize("batch", [1, 3])
def test_a_fixed_tree_keeps_the_text(
    batch: int, small_target: Target, head: Eagle3Head, same_text: Callable[..., Any]
) -> None:
    drafter = EagleDrafter(head, small_target, RankTree(((0,), (1,), (0, 0), (1, 0), (1, 0, 1))))
    for response in same_text(drafter, batch, max_new_tokens=14):
        assert {p.nodes for p in response.passes} == {5}


def test_more_ranks_than_there_are_tokens(small_target: Target, head: Eagle3Head) -> None:
    with pytest.raises(
        HeadsmithError, match="asks for 49 tokens at a place and the head can draft"
    ):
        EagleDrafter(head, small_target, RankTree(((48,),)))
