"""Where a text ends: at a limit, a stop id, a stop string or the end of the context."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.accept import GREEDY, Rule, Sample
from headsmith.inference.drafters import EagleDrafter
from headsmith.inference.engine import Decoder
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import Request, Response
from headsmith.inference.sampling import Shaping
from headsmith.inference.tree import Branches, Chain, DynamicTree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

Decode = Callable[..., list[Response]]
N = 14


@pytest.mark.parametrize("limit", range(1, 8))
def test_every_limit_of_new_tokens(limit: int, knowing: SimpleNamespace, same_text: Decode) -> None:
    for drafter in (knowing.Perfect(Chain(5)), knowing.RandomTrees(DynamicTree(9, 4, 5), 3)):
        got = same_text(drafter, 2, max_new_tokens=limit)
        assert all(len(r.output_ids) == limit and r.finish_reason == "length" for r in got)
        assert limit > 1 or all(not r.passes for r in got)


@pytest.mark.parametrize("offset", range(10))
def test_a_stop_id_at_every_offset_of_a_block(
    offset: int,
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    answers: dict[str, list[int]],
    decode: Decode,
    same_text: Decode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token that the target really says is declared to end the answer."""
    stop = answers["r0"][offset]
    monkeypatch.setitem(small_target.__dict__, "stop_ids", (stop,))
    first = answers["r0"].index(stop)
    for drafter in (knowing.Perfect(Chain(4)), knowing.RandomTrees(DynamicTree(9, 4, 5), 3)):
        got = same_text(drafter, 3, max_new_tokens=N)
        assert (got[0].output_ids, got[0].finish_reason) == (answers["r0"][: first + 1], "eos")
        again = decode(drafter, requests, batch=3, max_new_tokens=N, ignore_eos=True)
        assert all(len(r.output_ids) == N for r in again)


def test_stop_ids_can_be_ignored(
    small_target: Target,
    knowing: SimpleNamespace,
    requests: list[Request],
    answers: dict[str, list[int]],
    decode: Decode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(small_target.__dict__, "stop_ids", tuple(answers["r0"]))
    drafter = knowing.Perfect(Chain(4))
    for got in decode(drafter, requests, batch=3, max_new_tokens=N, ignore_eos=True):
        assert got.output_ids == answers[got.request.id][:N] and got.finish_reason == "length"


@pytest.mark.parametrize("begin", range(10))
def test_a_stop_string_across_steps(
    begin: int,
    small_target: Target,
    knowing: SimpleNamespace,
    answers: dict[str, list[int]],
    same_text: Decode,
) -> None:
    """It ends at every offset of a block of five, within one block and across two."""
    stop = small_target.tokenizer.decode(answers["r1"][begin : begin + 3])
    for drafter in (knowing.Perfect(Chain(4)), knowing.RandomTrees(DynamicTree(9, 4, 5), 3)):
        got = same_text(drafter, 3, max_new_tokens=N, stop_strings=("never said", stop))[1]
        assert got.finish_reason == "stop" and len(got.output_ids) <= begin + 3
        assert small_target.tokenizer.decode(got.output_ids).endswith(stop)


# Prompt r1 is the longest; its first three blocks of a perfect chain of 4 end with 1, 6, 11 tokens.
OFFSETS = [(stop, limit) for limit in (4, 6, 7) for stop in range(2, 9)]


@pytest.mark.parametrize("rule", [GREEDY, Sample(0.8, 3, Shaping(repetition=1.2))], ids=str)
@pytest.mark.parametrize(("stop", "limit"), OFFSETS)
def test_of_two_ends_in_a_block_the_first_counts(
    rule: Rule,
    stop: int,
    limit: int,
    small_target: Target,
    requests: list[Request],
    decode: Decode,
    knows: Callable[..., SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop id against the limit of new tokens, the context and a stop string, before, at and
    behind it, for greedy and drawn text.
    """
    told = decode(None, requests, max_new_tokens=N, rule=rule)
    said = {one.request.id: one.output_ids for one in told}
    answer = said["r1"]
    monkeypatch.setitem(small_target.__dict__, "stop_ids", (answer[stop - 1],))
    eos = answer.index(answer[stop - 1]) + 1
    drafters = [
        knows(said).Perfect(Chain(4)),
        knows(said).RandomTrees(DynamicTree(9, 4, 5), 3),
    ]
    whole = small_target.max_context
    text = small_target.tokenizer.decode(answer[:limit])[-3:]
    first = 1 + min(
        i for i in range(N) if text in str(small_target.tokenizer.decode(answer[: i + 1]))
    )
    ends: list[tuple[dict[str, Any], int, int, str]] = [
        ({"max_new_tokens": limit}, whole, limit, "length"),
        ({"max_new_tokens": N}, len(requests[1].prompt_ids) + limit, limit, "context"),
        ({"max_new_tokens": N, "stop_strings": (text,)}, whole, first, "stop"),
    ]
    for settings, context, other, reason in ends:
        monkeypatch.setattr(small_target.config, "max_position_embeddings", context)
        expected = (answer[: min(eos, other)], "eos" if eos <= other else reason)
        for drafter in (None, *drafters):
            (got,) = decode(drafter, requests[1:2], rule=rule, **settings)
            assert (got.output_ids, got.finish_reason) == expected


@pytest.mark.parametrize("offset", range(N))
def test_ratio_ends_where_its_text_would(
    offset: int,
    small_target: Target,
    head: Eagle3Head,
    requests: list[Request],
    decode: Decode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit or a stop id at every offset cuts the text of rule ratio and changes nothing before:
    that text is its own, so it is compared with itself.
    """
    rule = Ratio(0.8, seed=3)
    drafter = make_drafter(head, small_target, Branches((2, 2, 1)), rule)
    whole = [r.output_ids for r in decode(drafter, requests, max_new_tokens=N, rule=rule)]
    short = decode(drafter, requests, batch=2, max_new_tokens=offset + 1, rule=rule)
    assert [r.output_ids for r in short] == [ids[: offset + 1] for ids in whole]
    stop = whole[0][offset]
    monkeypatch.setitem(small_target.__dict__, "stop_ids", (stop,))
    (got,) = decode(drafter, requests[:1], max_new_tokens=N, rule=rule)
    end = whole[0].index(stop) + 1
    assert (got.output_ids, got.finish_reason) == (whole[0][:end], "eos")


@pytest.mark.parametrize("room", range(1, 9))
def test_the_context_ends_inside_a_block(
    room: int,
    small_target: Target,
    knowing: SimpleNamespace,
    head: Eagle3Head,
    requests: list[Request],
    same_text: Decode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = max(len(r.prompt_ids) for r in requests)
    limit = longest + room
    monkeypatch.setattr(small_target.config, "max_position_embeddings", limit)
    drafters = [
        knowing.Perfect(Chain(5)),
        knowing.RandomTrees(DynamicTree(9, 4, 5), 3),
        EagleDrafter(head, small_target, DynamicTree(9, 4, 5)),
    ]
    for drafter in drafters:
        got = same_text(drafter, 3, max_new_tokens=12)
        assert got[1].finish_reason == "context" and len(got[1].output_ids) == room
        # No node is verified whose token would lie beyond the context.
        for response in got:
            at = len(response.request.prompt_ids) + 1
            for p in response.passes:
                assert p.proposed <= limit - at
                at += p.committed


@pytest.mark.parametrize("length", [0, 256, 300])
def test_prompts_that_do_not_fit(length: int, small_target: Target) -> None:
    request = Request("long", "task", [1] * length)
    with pytest.raises(HeadsmithError, match=f"prompt long has {length} tokens; between 1 and 255"):
        Decoder(small_target).generate([request])


def test_a_prompt_that_leaves_room_for_one_token(decode: Decode) -> None:
    (response,) = decode(None, [Request("a", "t", [1] * 255)], max_new_tokens=5)
    assert len(response.output_ids) == 1 and response.finish_reason == "context"
