"""Whatever drafts, the text is the target's own: any tree, any batch, at any number accepted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import EagleDrafter
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Pass, Request, Response
from headsmith.inference.tree import Chain, DynamicTree, Shape, parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.spans import Span
from headsmith.models.target import Target

Decode = Callable[..., list[Response]]
N = 14


def texts(responses: list[Response]) -> list[tuple[list[int], str]]:
    return [(r.output_ids, r.finish_reason) for r in responses]


def test_plain_decoding_is_the_argmax_of_every_prefix(
    small_target: Target, requests: list[Request], answers: dict[str, list[int]]
) -> None:
    """The baseline itself, against one pass without a cache over prompt + answer."""
    for request in requests:
        ids = torch.tensor([*request.prompt_ids, *answers[request.id]])
        logits = small_target.logits(small_target.run(ids[:-1], [Span(len(ids) - 1)]).last)
        own = logits.argmax(-1)[len(request.prompt_ids) - 1 :]
        assert own.tolist() == answers[request.id]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_plain_batches_do_not_mix(batch: int, same_text: Decode) -> None:
    """More requests than slots, of every length: slots are used again."""
    got = same_text(None, batch, max_new_tokens=N)
    assert all(p == Pass(0, 0, 1, 0) for r in got for p in r.passes)


@pytest.mark.parametrize("length", [1, 2, 6])
def test_prompts_of_one_length_share_a_prefill(
    length: int, small_target: Target, head: Eagle3Head, decode: Decode
) -> None:
    """A stacked pass over empty slots must be causal like any other."""
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(small_target.vocab_size, (4, length), generator=generator).tolist()
    requests = [Request(str(i), "task", ids) for i, ids in enumerate(prompts)]
    expected = texts(decode(None, requests, batch=1, max_new_tokens=N))
    assert texts(decode(None, requests, batch=4, max_new_tokens=N)) == expected
    drafter = EagleDrafter(head, small_target, Chain(3))
    alone = decode(drafter, requests, batch=1, max_new_tokens=N)
    got = decode(drafter, requests, batch=4, max_new_tokens=N)
    assert texts(got) == texts(alone) == expected
    assert [r.passes for r in got] == [r.passes for r in alone]


SHAPES = [*(f"chain:{k}" for k in range(1, 9)), "tree:1,1,1", "tree:6,2,3", "tree:24,4,5"]


@pytest.mark.parametrize("shape", [*SHAPES, "tree:60,3,2"])
def test_a_head_does_not_change_the_text(
    shape: str, small_target: Target, head: Eagle3Head, same_text: Decode
) -> None:
    drafter = EagleDrafter(head, small_target, parse_shape(shape))
    for batch in (1, 3):
        for response in same_text(drafter, batch, max_new_tokens=N):
            assert all(p.nodes <= drafter.shape.nodes for p in response.passes)
            assert all(p.proposed <= drafter.shape.depth for p in response.passes)


@pytest.mark.parametrize("depth", range(1, 9))
def test_perfect_drafts_commit_depth_plus_one(
    depth: int, knowing: SimpleNamespace, same_text: Decode
) -> None:
    drafter = knowing.Perfect(Chain(depth))
    for response in same_text(drafter, 3, max_new_tokens=N):
        assert all(p == Pass(depth, depth, depth + 1, depth) for p in response.passes[:-1])
        assert len(response.passes) == -(-(N - 1) // (depth + 1))
    assert drafter.resets and drafter.committed == {}


def test_wrong_drafts_commit_one(knowing: SimpleNamespace, same_text: Decode) -> None:
    got = same_text(knowing.Adversarial(Chain(4)), 3, max_new_tokens=N)
    assert all(p == Pass(4, 0, 1, 4) for r in got for p in r.passes)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_ragged_acceptance(batch: int, knowing: SimpleNamespace, same_text: Decode) -> None:
    """Every request accepts another number in every pass."""
    got = same_text(knowing.Scripted(Chain(5)), batch, max_new_tokens=N)
    assert {p.accepted for r in got for p in r.passes} >= {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("batch", [1, 4])
def test_any_tree_keeps_the_text(
    seed: int, batch: int, knowing: SimpleNamespace, same_text: Decode
) -> None:
    """Accepted paths through scattered nodes: the cache must be put together from them."""
    drafter = knowing.RandomTrees(DynamicTree(14, 4, 6), seed)
    got = same_text(drafter, batch, max_new_tokens=30)
    assert max(p.accepted for r in got for p in r.passes) >= 2
    assert {p.nodes for r in got for p in r.passes} > {p.proposed for p in got[0].passes}


def test_float32_keeps_the_text(
    small_target: Target, knowing: SimpleNamespace, requests: list[Request], decode: Decode
) -> None:
    """With packed weights, where one row and several may round differently."""
    target = Target(
        copy.deepcopy(small_target.model).float(), small_target.tokenizer, "small, float32"
    )
    expected = texts(Decoder(target, None, max_new_tokens=N).generate(requests)[0])
    for drafter in (knowing.Scripted(Chain(5)), knowing.RandomTrees(DynamicTree(14, 4, 6), 1)):
        got = decode(drafter, requests, target, batch=3, max_new_tokens=N)
        assert texts(got) == expected


def test_a_drafter_sees_the_targets_own_taps(
    small_target: Target, knowing: SimpleNamespace, requests: list[Request], decode: Decode
) -> None:
    """Of the accepted path only, in its order, each beside the token that follows."""
    drafter = knowing.RandomTrees(DynamicTree(14, 4, 6), 2)
    seen: dict[int, list[Any]] = {}
    propose, release = drafter.propose, drafter.release

    def watch(updates: Any) -> Any:
        for update in updates:
            seen.setdefault(update.slot, []).append(update.taps)
        return propose(updates)

    def check(slot: int) -> None:
        tokens, taps = drafter.committed[slot], torch.cat(seen.pop(slot))
        text = next(t for t in drafter.texts if t[1 : 1 + len(tokens)] == tokens)
        expected = small_target.features(torch.tensor(text[: len(taps)]), [len(taps)], (1, 3))
        torch.testing.assert_close(taps, expected.taps, rtol=0, atol=1e-10)
        release(slot)

    drafter.propose, drafter.release = watch, check
    decode(drafter, requests, batch=3, max_new_tokens=N)
    assert not seen


def test_responses_are_given_out_as_they_finish(
    small_target: Target,
    requests: list[Request],
    answers: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request goes on longest, and is still the first of what is returned."""
    others = {t for r in requests[1:] for t in answers[r.id][1:3]}
    stop = tuple(others - set(answers["r0"][:6]))
    monkeypatch.setitem(small_target.__dict__, "stop_ids", stop)
    finished: list[str] = []
    responses, _ = Decoder(small_target, batch=len(requests), max_new_tokens=12).generate(
        requests, lambda response: finished.append(response.request.id)
    )
    assert sorted(finished) == [r.id for r in requests] and finished[0] != "r0"
    assert [r.request.id for r in responses] == [r.id for r in requests]


def test_a_decoder_can_be_used_again(
    small_target: Target, head: Eagle3Head, requests: list[Request], plain: Decode
) -> None:
    shape: Shape = Chain(3)
    decoder = Decoder(
        small_target, EagleDrafter(head, small_target, shape), batch=2, max_new_tokens=8
    )
    first, again = decoder.generate(requests)[0], decoder.generate(requests[::-1])[0][::-1]
    assert texts(first) == texts(again) == texts(plain(requests, max_new_tokens=8))
    assert [r.passes for r in first] == [r.passes for r in again]
    assert decoder.generate([])[0] == []


@pytest.mark.parametrize("arguments", [{"batch": 0}, {"batch": -1}, {"max_new_tokens": 0}])
def test_sizes_below_one_are_refused(arguments: dict[str, int], small_target: Target) -> None:
    with pytest.raises(HeadsmithError, match="must be at least 1"):
        Decoder(small_target, **arguments)
