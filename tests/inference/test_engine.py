"""Whatever drafts, the text is the target's own: any tree, any batch, any place where it ends."""

from __future__ import annotations

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

Plain = Callable[..., list[Response]]
N = 14


def check_accounts(response: Response) -> None:
    """Identities that hold for every response, whatever drafted it."""
    passes, length = response.passes, len(response.output_ids)
    assert sum(p.committed for p in passes) == length - 1
    for p in passes:
        assert 0 <= p.accepted <= p.proposed <= p.nodes
        assert 1 <= p.committed <= p.accepted + 1
    # Only the last pass can be cut.
    assert all(p.committed == p.accepted + 1 for p in passes[:-1])
    assert len(response.token_times) == length
    assert response.token_times == sorted(response.token_times)
    assert response.prefill_s == response.token_times[0]


def decode(
    target: Target, drafter: Any, requests: list[Request], **arguments: Any
) -> list[Response]:
    responses, phases = Decoder(target, drafter, **arguments).generate(requests)
    assert [r.request for r in responses] == requests
    for response in responses:
        check_accounts(response)
    assert min(phases.prefill_s, phases.draft_s, phases.verify_s, phases.other_s) >= 0
    return responses


def texts(responses: list[Response]) -> list[tuple[list[int], str]]:
    return [(r.output_ids, r.finish_reason) for r in responses]


@pytest.fixture(scope="module")
def head(small_target: Target) -> Eagle3Head:
    vocabulary = torch.arange(0, small_target.vocab_size, 2)
    return Eagle3Head.for_target(
        small_target, vocabulary, taps=(1, 2, 4), fc_norm=True, norm_output=True
    )


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
def test_plain_batches_do_not_mix(
    batch: int, small_target: Target, requests: list[Request], plain: Plain
) -> None:
    """More requests than slots, of every length: slots are used again."""
    got = decode(small_target, None, requests, batch=batch, max_new_tokens=N)
    assert texts(got) == texts(plain(requests, max_new_tokens=N))
    assert all(p == Pass(0, 0, 1, 0) for r in got for p in r.passes)


@pytest.mark.parametrize("length", [1, 2, 6])
def test_prompts_of_one_length_share_a_prefill(
    length: int, small_target: Target, head: Eagle3Head
) -> None:
    """A stacked pass over empty slots must be causal like any other."""
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(small_target.vocab_size, (4, length), generator=generator).tolist()
    requests = [Request(str(i), "task", ids) for i, ids in enumerate(prompts)]
    expected = texts(decode(small_target, None, requests, batch=1, max_new_tokens=N))
    assert texts(decode(small_target, None, requests, batch=4, max_new_tokens=N)) == expected
    drafter = EagleDrafter(head, small_target, Chain(3))
    alone = decode(small_target, drafter, requests, batch=1, max_new_tokens=N)
    got = decode(small_target, drafter, requests, batch=4, max_new_tokens=N)
    assert texts(got) == texts(alone) == expected
    assert [r.passes for r in got] == [r.passes for r in alone]


SHAPES = [*(f"chain:{k}" for k in range(1, 9)), "tree:1,1,1", "tree:6,2,3", "tree:24,4,5"]


@pytest.mark.parametrize("shape", [*SHAPES, "tree:60,3,2"])
def test_a_head_does_not_change_the_text(
    shape: str, small_target: Target, head: Eagle3Head, requests: list[Request], plain: Plain
) -> None:
    drafter = EagleDrafter(head, small_target, parse_shape(shape))
    expected = texts(plain(requests, max_new_tokens=N))
    for batch in (1, 3):
        got = decode(small_target, drafter, requests, batch=batch, max_new_tokens=N)
        assert texts(got) == expected
        for response in got:
            assert all(p.nodes <= drafter.shape.nodes for p in response.passes)
            assert all(p.proposed <= drafter.shape.depth for p in response.passes)


@pytest.mark.parametrize("depth", range(1, 9))
def test_perfect_drafts_commit_depth_plus_one(
    depth: int, small_target: Target, knowing: SimpleNamespace, requests: list[Request]
) -> None:
    drafter = knowing.Perfect(Chain(depth))
    got = decode(small_target, drafter, requests, batch=3, max_new_tokens=N)
    for response in got:
        assert all(p == Pass(depth, depth, depth + 1, depth) for p in response.passes[:-1])
        assert len(response.passes) == -(-(N - 1) // (depth + 1))
    assert drafter.resets and drafter.committed == {}


def test_wrong_drafts_commit_one(
    small_target: Target, knowing: SimpleNamespace, requests: list[Request], plain: Plain
) -> None:
    drafter = knowing.Adversarial(Chain(4))
    got = decode(small_target, drafter, requests, batch=3, max_new_tokens=N)
    assert texts(got) == texts(plain(requests, max_new_tokens=N))
    assert all(p == Pass(4, 0, 1, 4) for r in got for p in r.passes)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_ragged_acceptance(
    batch: int,
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    plain: Plain,
) -> None:
    """Every request accepts another number in every pass."""
    drafter = knowing.Scripted(Chain(5))
    got = decode(small_target, drafter, requests, batch=batch, max_new_tokens=N)
    assert texts(got) == texts(plain(requests, max_new_tokens=N))
    assert {p.accepted for r in got for p in r.passes} >= {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("batch", [1, 4])
def test_any_tree_keeps_the_text(
    seed: int,
    batch: int,
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    plain: Plain,
) -> None:
    """Accepted paths through scattered nodes: the cache must be put together from them."""
    drafter = knowing.RandomTrees(DynamicTree(14, 4, 6), seed)
    got = decode(small_target, drafter, requests, batch=batch, max_new_tokens=30)
    assert texts(got) == texts(plain(requests, max_new_tokens=30))
    assert max(p.accepted for r in got for p in r.passes) >= 2
    assert {p.nodes for r in got for p in r.passes} > {p.proposed for p in got[0].passes}


def test_float32_keeps_the_text(
    small_target: Target, knowing: SimpleNamespace, requests: list[Request]
) -> None:
    """With packed weights, where one row and several may round differently."""
    import copy

    target = Target(
        copy.deepcopy(small_target.model).float(), small_target.tokenizer, "small, float32"
    )
    expected = texts(Decoder(target, None, max_new_tokens=N).generate(requests)[0])
    for drafter in (knowing.Scripted(Chain(5)), knowing.RandomTrees(DynamicTree(14, 4, 6), 1)):
        got = decode(target, drafter, requests, batch=3, max_new_tokens=N)
        assert texts(got) == expected


def test_a_drafter_sees_the_targets_own_taps(
    small_target: Target, knowing: SimpleNamespace, requests: list[Request]
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
    decode(small_target, drafter, requests, batch=3, max_new_tokens=N)
    assert not seen


@pytest.mark.parametrize("limit", range(1, 8))
def test_every_limit_of_new_tokens(
    limit: int,
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    plain: Plain,
) -> None:
    expected = texts(plain(requests, max_new_tokens=limit))
    assert all(len(ids) == limit and reason == "length" for ids, reason in expected)
    for drafter in (knowing.Perfect(Chain(5)), knowing.RandomTrees(DynamicTree(9, 4, 5), 3)):
        got = decode(small_target, drafter, requests, batch=2, max_new_tokens=limit)
        assert texts(got) == expected
        assert limit > 1 or all(not r.passes for r in got)


@pytest.mark.parametrize("offset", range(10))
def test_a_stop_id_at_every_offset_of_a_block(
    offset: int,
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    answers: dict[str, list[int]],
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token that the target really says is declared to end the answer."""
    stop = answers["r0"][offset]
    monkeypatch.setitem(small_target.__dict__, "stop_ids", (stop,))
    expected = texts(plain(requests, max_new_tokens=N))
    first = answers["r0"].index(stop)
    assert expected[0] == (answers["r0"][: first + 1], "eos")
    for drafter in (knowing.Perfect(Chain(4)), knowing.RandomTrees(DynamicTree(9, 4, 5), 3)):
        got = decode(small_target, drafter, requests, batch=3, max_new_tokens=N)
        assert texts(got) == expected
        again = decode(small_target, drafter, requests, batch=3, max_new_tokens=N, ignore_eos=True)
        assert all(len(r.output_ids) == N for r in again)


def test_stop_ids_can_be_ignored(
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    answers: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(small_target.__dict__, "stop_ids", tuple(answers["r0"]))
    drafter = knowing.Perfect(Chain(4))
    got = decode(small_target, drafter, requests, batch=3, max_new_tokens=N, ignore_eos=True)
    assert texts(got) == [(answers[r.id][:N], "length") for r in requests]


@pytest.mark.parametrize("begin", range(5))
def test_a_stop_string_across_steps(
    begin: int,
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    answers: dict[str, list[int]],
    plain: Plain,
) -> None:
    stop = small_target.tokenizer.decode(answers["r1"][begin : begin + 3])
    arguments: dict[str, Any] = {"max_new_tokens": N, "stop_strings": ("never said", stop)}
    expected = texts(plain(requests, **arguments))
    ids, reason = expected[1]
    assert reason == "stop" and len(ids) <= begin + 3
    assert small_target.tokenizer.decode(ids).endswith(stop)
    got = decode(small_target, knowing.Perfect(Chain(4)), requests, batch=3, **arguments)
    assert texts(got) == expected


@pytest.mark.parametrize("room", range(1, 9))
def test_the_context_ends_inside_a_block(
    room: int,
    small_target: Target,
    knowing: SimpleNamespace,
    head: Eagle3Head,
    requests: list[Request],
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = max(len(r.prompt_ids) for r in requests)
    limit = longest + room
    monkeypatch.setattr(small_target.config, "max_position_embeddings", limit)
    expected = texts(plain(requests, max_new_tokens=12))
    assert expected[1][1] == "context" and len(expected[1][0]) == room
    drafters = [
        knowing.Perfect(Chain(5)),
        knowing.RandomTrees(DynamicTree(9, 4, 5), 3),
        EagleDrafter(head, small_target, DynamicTree(9, 4, 5)),
    ]
    for drafter in drafters:
        got = decode(small_target, drafter, requests, batch=3, max_new_tokens=12)
        assert texts(got) == expected
        # No node is verified whose token would lie beyond the context.
        for response in got:
            at = len(response.request.prompt_ids) + 1
            for p in response.passes:
                assert p.proposed <= limit - at
                at += p.committed


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
    small_target: Target, head: Eagle3Head, requests: list[Request], plain: Plain
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


@pytest.mark.parametrize("length", [0, 256, 300])
def test_prompts_that_do_not_fit(length: int, small_target: Target) -> None:
    request = Request("long", "task", [1] * length)
    with pytest.raises(HeadsmithError, match=f"prompt long has {length} tokens; between 1 and 255"):
        Decoder(small_target).generate([request])


def test_a_prompt_that_leaves_room_for_one_token(small_target: Target) -> None:
    (response,) = decode(small_target, None, [Request("a", "t", [1] * 255)], max_new_tokens=5)
    assert len(response.output_ids) == 1 and response.finish_reason == "context"
