"""Two real heads reproduce what vLLM drafted and said with them, token for token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.engine import Decoder
from headsmith.inference.equality import check_equality
from headsmith.inference.records import Request
from headsmith.inference.tree import Chain, Tree, parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

NAMES = ["eagle31-native", "eagle31-speculators"]


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir)


class Recording(EagleDrafter):
    """Keeps every tree it proposed."""

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        trees = super().propose(updates)
        self.trees = [*getattr(self, "trees", []), *trees]
        return trees


def golden(shared_dir: Path, name: str, target: Target) -> tuple[Eagle3Head, dict[str, Any]]:
    folder = shared_dir / "golden" / name
    if not folder.is_dir():
        pytest.skip(f"no reference head in {folder}")
    head = Eagle3Head.load(folder, num_target_layers=target.num_layers)
    return head, json.loads((folder / "trace.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_draft_and_every_token_of_the_trace(
    name: str, target: Target, shared_dir: Path
) -> None:
    head, trace = golden(shared_dir, name, target)
    assert head.kind == "eagle3.1" and head.taps == (2, 15, 27)
    compared = 0
    for number, expected in enumerate(trace["requests"]):
        drafter = Recording(head, target, Chain(trace["depth"]))
        decoder = Decoder(target, drafter, max_new_tokens=64)
        request = Request(str(number), "trace", expected["prompt_ids"])
        ((response,), _) = decoder.generate([request])
        assert response.output_ids == expected["output_ids"], f"request {number}"
        # The proposal made behind a request's last token is never verified.
        length = len(expected["output_ids"])
        steps = [s for s in expected["steps"] if s["committed"] < length]
        assert [t.tokens[1:] for t in drafter.trees] == [s["drafts"] for s in steps]
        # What the engine says it accepted in the last pass is cut at the limit, too.
        committed = [min(s["accepted"] + 1, length - s["committed"]) for s in steps]
        assert [p.committed for p in response.passes] == committed
        compared += len(steps)
    assert len(trace["requests"]) == 12 and compared > 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "shape"), [(4, "chain:4"), (1, "tree:24,4,5"), (4, "tree:24,4,5")]
)
def test_batches_and_trees_say_the_same(
    batch: int, shape: str, target: Target, shared_dir: Path
) -> None:
    head, trace = golden(shared_dir, NAMES[0], target)
    expected = trace["requests"][:4]
    requests = [Request(str(i), "trace", r["prompt_ids"]) for i, r in enumerate(expected)]
    drafter = EagleDrafter(head, target, parse_shape(shape))
    responses, _ = Decoder(target, drafter, batch=batch, max_new_tokens=64).generate(requests)
    assert [r.output_ids for r in responses] == [r["output_ids"] for r in expected]
    equality = check_equality(target, responses)
    assert equality.exact == equality.checked and not equality.fails and not equality.ties
    tau = sum(p.committed for r in responses for p in r.passes) / sum(
        len(r.passes) for r in responses
    )
    assert tau > 1.15
