"""The coupled test on the real target: sampled text with a head is that of plain sampling, token
for token, penalties on. A short run; benchmarks/coupled.py is the long one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headsmith.inference.accept import Rule, Sample
from headsmith.inference.distribution import check_distribution
from headsmith.inference.engine import Decoder
from headsmith.inference.equality import check_equality
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import Request, Response
from headsmith.inference.sampling import Shaping
from headsmith.inference.tree import parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

SHAPING = Shaping(repetition=1.1, presence=0.2, frequency=0.1, top_p=0.9)
N = 16


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir)


@pytest.fixture(scope="module")
def requests(target: Target) -> list[Request]:
    builder = RequestBuilder(target.tokenizer, target.max_context)
    return [builder.build(one) for one in load_prompts("default", limit=8)]


@pytest.fixture(scope="module")
def head(target: Target, shared_dir: Path) -> Eagle3Head:
    folder = shared_dir / "golden" / "eagle31-native"
    if not folder.is_dir():
        pytest.skip(f"no reference head in {folder}")
    return Eagle3Head.load(folder, num_target_layers=target.num_layers)


def decode(
    target: Target,
    head: Eagle3Head | None,
    requests: list[Request],
    rule: Rule,
    batch: int = 1,
    shape: str = "chain:4",
) -> list[Response]:
    drafter = make_drafter(head, target, parse_shape(shape), rule) if head else None
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=N, rule=rule)
    return decoder.generate(requests)[0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_the_text_is_that_of_plain_sampling(
    temperature: float, target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    rule = Sample(temperature, 1, SHAPING)
    plain = decode(target, None, requests, rule)
    for batch, shape in ((1, "chain:4"), (8, "chain:4"), (8, "tree:24,4,5")):
        got = decode(target, head, requests, rule, batch, shape)
        assert [r.output_ids for r in got] == [r.output_ids for r in plain]
        judged = check_equality(target, got, rule=rule)
        assert judged.exact == judged.checked


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain:4", "branches:3,2,1"])
def test_ratio_could_be_the_targets_own_draws(
    shape: str, target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    rule = Ratio(0.7, 1, SHAPING)
    got = decode(target, head, requests, rule, 8, shape)
    assert sum(p.accepted for one in got for p in one.passes) > 0
    judged = check_distribution(target, got, rule)
    assert judged.impossible == 0 and judged.z is not None and abs(judged.z) < 4
