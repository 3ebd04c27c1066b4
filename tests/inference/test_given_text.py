"""Given text: followed while it is right, found again after each difference."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.drafter_choice import GivenText
from headsmith.inference.engine import Decoder
from headsmith.inference.given_text import Alignment, GivenTextDrafter
from headsmith.inference.records import Request, Response
from headsmith.inference.tree import Chain, DynamicTree, RankTree, Shape
from headsmith.models.target import Target

GIVEN = list(range(100, 200))
LENGTH = 160


def place_after(output: list[int], given: list[int] = GIVEN) -> int:
    """Where an answer that came token by token is taken to be."""
    text = Alignment(given)
    for token in output:
        text.follow([token])
    return text.at


@pytest.mark.parametrize(
    ("output", "at"),
    [
        ([100, 101, 102], 3),
        ([100, 101, 7], 3),  # one token for another
        ([100, 101, 7, 103], 4),
        ([100, 101, 105], 6),  # some left out
        ([100, 101, 7, 8, 9, 102], 3),  # some put in
        ([100, 101, 7, 8, 9, 102, 103], 4),
        ([150, 151], 52),  # a start from elsewhere: two tokens are a match, however far
        ([100, 101, 180], 3),  # one token is none
        ([7], 1),
    ],
)
def test_the_place_is_found_again(output: list[int], at: int) -> None:
    assert place_after(output) == at


def test_the_longest_match_wins_and_then_the_closest() -> None:
    given = [1, 2, 3, 9, 9, 9, 1, 2, 4, 9, 9, 9, 5, 2, 6]
    assert place_after([1, 2, 3, 7, 5, 2], given) == 14
    # (1, 2) stands there twice.
    assert place_after([8, 8, 8, 8, 1, 2], given) == 8
    assert place_after([8, 1, 2], given) == 2


def test_a_pass_that_ends_on_a_difference_is_aligned_at_its_end() -> None:
    text = Alignment(GIVEN)
    text.follow([100])
    text.follow([101, 102, 120, 121])
    assert text.at == 22
    assert text.places() == [22]


def test_behind_its_end_nothing_is_given() -> None:
    text = Alignment([1, 2])
    text.follow([1, 2, 3])
    assert text.given[text.at :] == []


@pytest.fixture(scope="module")
def edits(small_target: Target, requests: list[Request]) -> list[Request]:
    """Prompts whose given text is the target's own answer with one token in twenty another."""
    decoder = Decoder(small_target, batch=5, max_new_tokens=LENGTH)
    chooser = random.Random(0)
    changed = []
    for response in decoder.generate(requests)[0]:
        given = list(response.output_ids)
        for at in chooser.sample(range(LENGTH), LENGTH // 20):
            given[at : at + 1] = [[], [7], [7, 8]][chooser.randrange(3)]
        changed.append(replace(response.request, given_ids=given))
    return changed


def tau(responses: list[Response]) -> float:
    passes = [p for r in responses for p in r.passes]
    return sum(p.committed for p in passes) / len(passes)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_edit_of_five_percent_commits_more_than_five_tokens_a_pass(
    batch: int, edits: list[Request], decode: Callable[..., Any]
) -> None:
    for shape in (Chain(16), DynamicTree(32, 2, 16)):
        drafter = GivenTextDrafter(GivenText(), shape)
        assert tau(decode(drafter, edits, batch=batch, max_new_tokens=LENGTH)) > 5


def test_a_text_that_is_not_found_again_commits_fewer(
    edits: list[Request], decode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Alignment, "_matches", lambda self: [])
    drafter = GivenTextDrafter(GivenText(), Chain(16))
    assert tau(decode(drafter, edits, batch=4, max_new_tokens=LENGTH)) < 3


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_the_answer_itself_is_always_right(
    depth: int,
    requests: list[Request],
    answers: dict[str, list[int]],
    same_text: Callable[..., Any],
) -> None:
    """One text for all requests: it is that of the first."""
    drafter = GivenTextDrafter(GivenText(), Chain(depth), answers["r0"])
    response = same_text(drafter, 3, max_new_tokens=14)[0]
    assert [p.accepted for p in response.passes[:-1]] == [depth] * (len(response.passes) - 1)
    assert len(response.passes) == -(-13 // (depth + 1))


def test_a_request_without_a_text_is_named(
    small_target: Target, requests: list[Request], edits: list[Request]
) -> None:
    decoder = Decoder(small_target, GivenTextDrafter(GivenText(), Chain(3)), max_new_tokens=4)
    assert decoder.generate(edits[:1])
    with pytest.raises(HeadsmithError, match="prompt r0 has no given text"):
        decoder.generate(requests)


def test_shapes_of_ranks_are_refused() -> None:
    shape: Shape = RankTree.chain(2)
    with pytest.raises(HeadsmithError, match="cannot be filled by drafter text; give chain"):
        GivenTextDrafter(GivenText(), shape)
