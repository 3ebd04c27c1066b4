"""The decoder with a queue and with prompts in chunks: the same text, and times that add up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.arrival import Arrival
from headsmith.inference.drafters import EagleDrafter
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request, Response
from headsmith.inference.tree import Chain, DynamicTree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

Decode = Callable[..., list[Response]]
N = 12


def passes(responses: list[Response]) -> list[Any]:
    return [(r.output_ids, r.finish_reason, r.passes) for r in responses]


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 17, 400])
@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(6, 2, 3)])
def test_prompts_in_chunks_give_the_same_passes(
    chunk: int, shape: Any, small_target: Target, head: Eagle3Head, requests: list[Request],
    decode: Decode,
) -> None:  # fmt: skip
    """Text and every count: the head reads the same rows, whatever the chunk's end cuts."""
    drafter = EagleDrafter(head, small_target, shape)
    for batch in (1, 3):
        whole = decode(drafter, requests, batch=batch, max_new_tokens=N)
        parts = decode(drafter, requests, batch=batch, max_new_tokens=N, prefill_chunk=chunk)
        assert passes(parts) == passes(whole)


def test_a_chunk_bounds_the_prompt_tokens_of_a_pass(
    small_target: Target, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the requests that write go on between the chunks of one that is read."""
    sizes: list[tuple[str, int]] = []
    real, step = small_target.run, Decoder._step

    def run(ids: torch.Tensor, *rest: Any) -> Any:
        sizes.append(("pass", len(ids)))
        return real(ids, *rest)

    def stepped(self: Decoder, active: list[Any]) -> None:
        sizes.append(("step", len(active)))
        step(self, active)

    monkeypatch.setattr(small_target, "run", run)
    monkeypatch.setattr(Decoder, "_step", stepped)
    short, long = requests[0], requests[1]
    Decoder(small_target, batch=2, max_new_tokens=N, prefill_chunk=4).generate([short, long])
    reads = [n for i, (kind, n) in enumerate(sizes) if kind == "pass" and sizes[i - 1][0] != "step"]
    assert max(reads) == 4 and sum(reads) == len(short.prompt_ids) + len(long.prompt_ids)
    # The short one wrote alone while the long one was still read.
    assert sizes.count(("step", 1)) >= 3


def test_a_perfect_drafter_is_perfect_in_chunks(
    knowing: SimpleNamespace, same_text: Decode
) -> None:
    got = same_text(knowing.Perfect(Chain(3)), 3, max_new_tokens=N, prefill_chunk=4)
    assert all(p.accepted == p.proposed for r in got for p in r.passes[:-1])


@pytest.mark.parametrize("arrival", [Arrival("constant", 40.0), Arrival("poisson", 60.0, 5)])
def test_late_requests_have_their_own_text_and_times(
    arrival: Arrival, small_target: Target, requests: list[Request], plain: Decode
) -> None:
    decoder = Decoder(small_target, batch=2, max_new_tokens=N, arrival=arrival)
    got, phases = decoder.generate(requests)
    assert [r.output_ids for r in got] == [r.output_ids for r in plain(requests, max_new_tokens=N)]
    assert all(r.queue_s >= 0 for r in got)
    assert sum(len(r.passes) for r in got) == sum(one.running for one in decoder.rounds)
    total = sum(one.phases.decode_s for one in decoder.rounds)
    assert total == pytest.approx(phases.decode_s)


def test_who_waits_for_a_slot_waits_as_long_as_the_others_took(
    small_target: Target, requests: list[Request]
) -> None:
    got, _ = Decoder(small_target, batch=1, max_new_tokens=N).generate(requests)
    waited = 0.0
    for one in got:
        assert one.queue_s >= waited
        waited = one.queue_s + one.token_times[-1]


def test_a_slot_that_is_free_stays_free_until_somebody_comes(
    small_target: Target, requests: list[Request]
) -> None:
    """Far apart, nobody meets anybody and nobody waits."""
    decoder = Decoder(small_target, batch=4, max_new_tokens=3, arrival=Arrival("constant", 1.0))
    got, _ = decoder.generate(requests[:3])
    assert {one.running for one in decoder.rounds} == {1}
    assert max(r.queue_s for r in got) < 0.1


def test_a_chunk_of_nothing(small_target: Target) -> None:
    with pytest.raises(HeadsmithError, match="prefill_chunk is 0"):
        Decoder(small_target, prefill_chunk=0)
