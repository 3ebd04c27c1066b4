"""Rounds that stay on the device give the tokens and drafts of the reference path, and nothing in
them depends on the host: they are recorded once, as a CUDA graph records them, and replayed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request
from headsmith.inference.resident.state import State
from headsmith.models.target import Target

EVERY = ("none", "eagle3 chain", "eagle3 tree", "eagle3.1 chain", "eagle3.1 tree")
EVERY += ("medusa shared", "medusa private", "medusa truncated")
ON_DEVICE = [("greedy", kind) for kind in EVERY]
ON_DEVICE += [("sample", kind) for kind in ("none", "eagle3 tree", "medusa shared")]
ON_DEVICE += [("typical", kind) for kind in ("eagle3 chain", "eagle3.1 tree", "medusa private")]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind"), ON_DEVICE)
def test_replayed_rounds_give_the_tokens_of_the_references(
    rule: str, kind: str, requests: list[Request], same_with_kernels: Any, taped: list[Any]
) -> None:
    # Two at a time, so that the third joins in the middle and is alone in the end.
    found = same_with_kernels(kind, rule, requests, rounds="graph", batch=2, max_new_tokens=5)
    assert found.kernels - {"compaction"} == found.due | {"rounds on the device", "CUDA graphs"}
    assert len(taped) == 4, "drafting and verification of one and of two requests"


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ["graph", "device"])
def test_requests_that_fill_up_change_nothing(
    rounds: str, requests: list[Request], same_with_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[State] = []
    empty = State.empty

    def noted(*args: Any) -> State:
        made.append(empty(*args))
        return made[-1]

    monkeypatch.setattr(State, "empty", noted)
    # Three requests in a bucket of four.
    found = same_with_kernels("eagle3 tree", "greedy", requests, rounds=rounds, batch=5)
    assert "rounds on the device" in found.kernels and "CUDA graphs" not in found.kernels
    (state,) = made
    assert len(state.slots) == 4 and state.live.tolist() == [1, 1, 1, 0]
    assert state.slots.tolist() == [0, 1, 2, 5]
    assert (state.lengths[3], state.written[3], state.counts[3]) == (2, 0, 1)
    assert state.lengths[0] == len(requests[0].prompt_ids) + len(found.responses[0].output_ids)


def test_a_part_that_asks_the_host_runs_without_a_graph(
    requests: list[Request],
    same_with_kernels: Any,
    taped: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_at = Target.run_at

    def asking(self: Target, ids: torch.Tensor, *args: Any) -> Any:
        int(ids.max())
        return run_at(self, ids, *args)

    monkeypatch.setattr(Target, "run_at", asking)
    found = same_with_kernels("none", "greedy", requests[:1], rounds="graph")
    assert {"CUDA graphs", "no CUDA graph (a number is read by the host)"} <= found.kernels


@pytest.mark.slow
def test_rounds_near_the_end_of_the_context_need_the_host(
    requests: list[Request], same_with_kernels: Any
) -> None:
    found = same_with_kernels(
        "eagle3 chain", "greedy", requests[2:], rounds="device", max_new_tokens=20
    )
    assert found.responses[0].finish_reason == "context"
    assert "rounds on the device" in found.kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"stop_strings": ['"&'], "max_new_tokens": 9}, {"prefill_chunk": 4, "batch": 2}],
    ids=["stop string", "chunks of prompts"],
)
def test_what_the_host_does_between_rounds(
    options: dict[str, Any], requests: list[Request], same_with_kernels: Any
) -> None:
    same_with_kernels("eagle3 tree", "greedy", requests, rounds="device", **options)


def test_a_second_run_keeps_what_was_captured(
    models: tuple[Target, ...], requests: list[Request], taped: list[Any]
) -> None:
    decoder = Decoder(models[0], max_new_tokens=4)
    first = decoder.generate(requests[:1])[0]
    # A longer prompt, and the same as before.
    decoder.generate(requests[2:])
    again = decoder.generate(requests[:1])[0]
    assert first[0].output_ids == again[0].output_ids and len(taped) == 2


def test_a_wrong_wish_for_rounds(
    models: tuple[Target, ...], requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSMITH_ROUNDS", "gpu")
    with pytest.raises(HeadsmithError, match="HEADSMITH_ROUNDS=gpu is not one of graph, device"):
        Decoder(models[0], max_new_tokens=4).generate(requests[:1])


# A piece of source replaced, who has the wrong thing, a drafter and a rule that show it.
ROUNDS, DRAFTING, STATE = (
    "engine.rounds_for",
    "resident.rounds.drafting_of",
    "resident.rounds.State",
)
WRONG = {
    "states of another request": (
        "rounds",
        "order[:-1, None] * nodes + paths",
        "0 * order[:-1, None] + paths",
        ROUNDS,
        "tree",
    ),
    "noise of the root for all": (
        "rounds",
        "* path + depths).flatten",
        "* path + 0 * depths).flatten",
        ROUNDS,
        "sample",
    ),
    "lengths as they were recorded": (
        "rounds",
        "starts, tree = state.starts,",
        "starts, tree = torch.full_like(state.starts, state.starts.numpy()[0]),",
        ROUNDS,
        "tree",
    ),
    "rejected nodes are kept": (
        "rounds",
        "starts.int(), said.paths, count",
        "starts.int(), said.paths, 0 * count",
        ROUNDS,
        "tree",
    ),
    "padding for the last row": (
        "drafting",
        "* path + state.counts - 1",
        "* path + path - 1",
        DRAFTING,
        "chain",
    ),
    "a row left out between drafts": (
        "drafting",
        "rows = state.starts + step",
        "rows = state.starts + 2 * step",
        DRAFTING,
        "chain",
    ),
    "committed rows one place off": (
        "drafting",
        "starts = state.starts - state.counts",
        "starts = state.starts - 1",
        DRAFTING,
        "chain",
    ),
    "no ancestors": (
        "drafting",
        "words_of(seen), self",
        "words_of(seen & False), self",
        DRAFTING,
        "tree",
    ),
    "another rank": (
        "drafting",
        "[p[-1] for p in paths]",
        "[0 for p in paths]",
        DRAFTING,
        "medusa",
    ),
    "the state of another token": (
        "state",
        "self.rows.gather(1, self.counts[:, None] - 1)",
        "self.rows",
        STATE,
        "medusa",
    ),
}
SHOWN = {
    "tree": ("eagle3.1 tree", "greedy"),
    "chain": ("eagle3 chain", "greedy"),
    "medusa": ("medusa private", "greedy"),
    "sample": ("medusa shared", "sample"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rounds_are_caught(name: str, caught: Any, taped: list[Any]) -> None:
    module, old, new, taken_by, shown = WRONG[name]
    # Drafts are seldom kept by chance where tokens are drawn.
    tokens = 9 if shown == "sample" else 5
    wrong = (f"resident.{module}", old, new)
    caught(wrong, taken_by, *SHOWN[shown], rounds="graph", max_new_tokens=tokens)
