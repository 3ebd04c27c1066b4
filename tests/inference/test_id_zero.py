"""Id 0 is a token like any other, not an end, a padding or "nothing drafted": a target that writes
it often keeps its text with every kind of head.
"""

from __future__ import annotations

import copy

import pytest
import torch

from headsmith.inference.calibrate import calibrate
from headsmith.inference.engine import Decoder
from headsmith.inference.equality import check_equality
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.records import Request
from headsmith.inference.tree import parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

N = 20


@pytest.fixture(scope="module")
def zero_target(small_target: Target) -> Target:
    """The small target with a row of lm_head for id 0 that often wins."""
    model = copy.deepcopy(small_target.model)
    with torch.no_grad():
        model.get_output_embeddings().weight[0] *= 3
    return Target(model, small_target.tokenizer, "zero")


@pytest.fixture(scope="module")
def wanted(zero_target: Target, requests: list[Request]) -> list[list[int]]:
    responses, _ = Decoder(zero_target, batch=5, max_new_tokens=N).generate(requests)
    texts = [one.output_ids for one in responses]
    flat = [token for text in texts for token in text]
    assert 0.1 < flat.count(0) / len(flat) < 0.9
    return texts


def head_of(kind: str, target: Target, requests: list[Request]) -> Head:
    if kind == "medusa":
        medusa = MedusaHead.for_target(target, num_heads=3).double()
        medusa.calibration = calibrate(medusa, target, requests, nodes=12, max_new_tokens=N)
        return medusa
    new = kind == "eagle3.1"
    return Eagle3Head.for_target(
        target, torch.arange(96), taps=(1, 2, 4), fc_norm=new, norm_output=new
    ).double()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1", "medusa"])
def test_the_text_is_the_same(
    kind: str,
    batch: int,
    zero_target: Target,
    requests: list[Request],
    wanted: list[list[int]],
) -> None:
    head = head_of(kind, zero_target, requests)
    drafted = 0
    for draft in ("chain:3", "medusa:12" if kind == "medusa" else "tree:12,3,3"):
        drafter = make_drafter(head, zero_target, parse_shape(draft))
        responses, _ = Decoder(zero_target, drafter, batch=batch, max_new_tokens=N).generate(
            requests
        )
        assert [one.output_ids for one in responses] == wanted
        equality = check_equality(zero_target, responses)
        assert equality.exact == equality.checked == 5 * N
        drafted += sum(one.accepted for response in responses for one in response.passes)
    assert drafted > 0
