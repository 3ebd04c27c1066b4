"""The margin check: exact, tie or fail, token by token."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.equality import check_equality
from headsmith.inference.records import Request, Response
from headsmith.models.spans import Span
from headsmith.models.target import Target


@pytest.fixture
def responses(requests: list[Request], plain: Callable[..., list[Response]]) -> list[Response]:
    return plain(requests, max_new_tokens=10)


def test_plain_text_is_exact(small_target: Target, responses: list[Response]) -> None:
    got = check_equality(small_target, responses)
    assert (got.checked, got.exact, got.ties, got.fails) == (50, 50, 0, 0)
    assert got.first_divergence is None
    assert check_equality(small_target, []).checked == 0


def second_choice(target: Target, response: Response, index: int) -> tuple[int, float]:
    """The target's second choice at an output index, and how far below the first it is."""
    ids = [*response.request.prompt_ids, *response.output_ids[:index]]
    last = target.run(torch.tensor(ids), [Span(len(ids))]).last[-1:]
    top = target.logits(last)[0].topk(2)
    return int(top.indices[1]), float(top.values[0] - top.values[1])


@pytest.mark.parametrize("place", [(0, 9), (2, 9), (4, 9)])
def test_a_wrong_token_is_found(
    place: tuple[int, int], small_target: Target, responses: list[Response]
) -> None:
    which, index = place
    token = responses[which].output_ids[index]
    wrong, margin = second_choice(small_target, responses[which], index)
    responses[which].output_ids[index] = next(t for t in (1, 2, 3) if t not in (token, wrong))
    got = check_equality(small_target, responses, tie_margin=1e9)
    assert (got.checked, got.exact, got.ties, got.fails) == (50, 49, 0, 1)
    assert got.first_divergence is not None
    assert got.first_divergence["id"] == f"r{which}" and got.first_divergence["index"] == index
    assert float(got.first_divergence["margin"]) > margin


def test_the_check_goes_on_behind_a_wrong_token(
    small_target: Target, responses: list[Response]
) -> None:
    """Each token is judged behind the text that was given out, so one error is not all errors."""
    response = responses[1]
    response.output_ids[3], _ = second_choice(small_target, response, 3)
    for index in range(4, 10):
        ids = [*response.request.prompt_ids, *response.output_ids[:index]]
        last = small_target.run(torch.tensor(ids), [Span(len(ids))]).last[-1:]
        response.output_ids[index] = int(small_target.logits(last).argmax())
    got = check_equality(small_target, responses, tie_margin=0.0)
    assert (got.exact, got.ties, got.fails) == (49, 0, 1)
    assert got.first_divergence is not None and got.first_divergence["index"] == 3


def test_a_near_tie_is_a_tie_within_the_margin(
    small_target: Target, responses: list[Response]
) -> None:
    response = responses[3]
    response.output_ids[-1], margin = second_choice(small_target, response, 9)
    within = check_equality(small_target, responses, tie_margin=margin + 1e-6)
    assert (within.exact, within.ties, within.fails) == (49, 1, 0)
    assert within.first_divergence == {
        "id": "r3",
        "index": 9,
        "margin": pytest.approx(margin, abs=1e-9),
    }
    beyond = check_equality(small_target, responses, tie_margin=margin - 1e-6)
    assert (beyond.exact, beyond.ties, beyond.fails) == (49, 0, 1)


def test_an_equal_logit_is_exact(small_target: Target, responses: list[Response]) -> None:
    """Two ids with one row in the output head: either is the target's own."""
    twins = copy.deepcopy(small_target.model)
    token = responses[0].output_ids[0]
    other = (token + 1) % small_target.vocab_size
    with torch.no_grad():
        twins.get_output_embeddings().weight[other] = twins.get_output_embeddings().weight[token]
    target = Target(twins, small_target.tokenizer, "twins")
    response = responses[0]
    response.output_ids[:] = [other]
    got = check_equality(target, [response])
    assert (got.checked, got.exact) == (1, 1)


def test_logits_that_are_no_numbers_are_refused(
    small_target: Target, responses: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Target, "logits", lambda self, last: torch.full((len(last), 96), float("nan"))
    )
    with pytest.raises(HeadsmithError, match="prompt r0 hold NaN or infinity"):
        check_equality(small_target, responses[:1])
