"""Metrics against hand-made traces: the identities of spec/verifier.md 1.1 and the conventions."""

from __future__ import annotations

import json
import random

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.metrics import (
    bootstrap_tau,
    by_task,
    conditional,
    equivalents,
    summarise,
    unconditional,
)
from headsmith.inference.records import Pass, Phases, Request, Response, Steps


def steps(
    passes: list[tuple[int, int, int]],
    *,
    id: str = "a",
    task: str = "chat",
    finish: str = "length",
) -> Steps:
    """A record of (proposed, accepted, committed) passes; a chain verifies what it drafts."""
    return Steps(
        id=id,
        task=task,
        prompt_tokens=5,
        output_tokens=1 + sum(committed for _, _, committed in passes),
        finish_reason=finish,  # type: ignore[arg-type]
        passes=[Pass(p, a, c, p) for p, a, c in passes],
    )


def random_records(seed: int, count: int = 12, depth: int = 4) -> list[Steps]:
    """Untruncated records of chains of one depth."""
    draw = random.Random(seed)
    records = []
    for number in range(count):
        accepted = [draw.randint(0, depth) for _ in range(draw.randint(1, 20))]
        records.append(steps([(depth, a, a + 1) for a in accepted], id=str(number)))
    return records


def test_hand_made_trace() -> None:
    # V = 4; accepted 3, 0, 2, 3; the last pass committed 2 of 4 because EOS came inside it.
    record = steps([(3, 3, 4), (3, 0, 1), (3, 2, 3), (3, 3, 2)], finish="eos")
    metrics = summarise([record])
    assert metrics["tau"] == 10 / 4
    assert metrics["tau_macro"] == 10 / 4
    assert metrics["acceptance_rate"] == 8 / 12
    assert metrics["per_position"] == [3 / 4, 3 / 4, 2 / 4]
    assert metrics["conditional"] == [3 / 4, 1.0, pytest.approx(2 / 3)]
    assert metrics["histogram"] == [1, 0, 1, 2]
    assert (metrics["requests"], metrics["tokens"], metrics["passes"]) == (1, 11, 4)
    assert metrics["zero_accept_fraction"] == 1 / 4
    assert metrics["truncated"] == {"eos": 1, "stop": 0, "length": 0}
    assert metrics["nodes_per_token"] == 12 / 10
    assert metrics["tau_ci"] is None


@pytest.mark.parametrize("seed", range(5))
def test_identities(seed: int) -> None:
    records = random_records(seed)
    metrics = summarise(records)
    u = metrics["per_position"]
    assert metrics["tau"] == pytest.approx(1 + sum(u), abs=1e-12)
    assert u == sorted(u, reverse=True)
    product, total = 1.0, 1.0
    for c in metrics["conditional"]:
        assert c is not None
        product *= c
        total += product
    assert metrics["tau"] == pytest.approx(total, abs=1e-12)
    committed = sum(one.committed for record in records for one in record.passes)
    assert committed == metrics["tokens"] - metrics["requests"]
    assert sum(metrics["histogram"]) == metrics["passes"]
    assert metrics["acceptance_rate"] == pytest.approx(sum(u) / 4)


def test_micro_weighs_passes_and_macro_weighs_requests() -> None:
    short = steps([(4, 4, 5)], id="short")
    long = steps([(4, 0, 1)] * 9, id="long")
    metrics = summarise([short, long])
    assert metrics["tau"] == 14 / 10
    assert metrics["tau_macro"] == (5 + 1) / 2


def test_position_that_was_never_reached_has_no_conditional_rate() -> None:
    metrics = summarise([steps([(4, 0, 1), (4, 1, 2)])])
    assert metrics["per_position"] == [0.5, 0.0, 0.0, 0.0]
    assert metrics["conditional"] == [0.5, 0.0, None, None]
    assert metrics["histogram"] == [1, 1, 0, 0, 0]


def test_tree_counts_nodes_apart_from_depth() -> None:
    record = Steps("a", "chat", 3, 4, "length", [Pass(5, 2, 3, 24)])
    metrics = summarise([record])
    assert metrics["acceptance_rate"] == 2 / 5
    assert metrics["nodes_per_token"] == 8.0
    assert len(metrics["per_position"]) == 5


def test_plain_decoding_has_tau_one_and_no_rates() -> None:
    metrics = summarise([steps([(0, 0, 1)] * 7), steps([(0, 0, 1)] * 3, id="b")])
    assert metrics["tau"] == 1.0
    assert metrics["tau_ci"] == [1.0, 1.0]
    assert metrics["acceptance_rate"] is None
    assert metrics["per_position"] == [] and metrics["conditional"] == []
    assert metrics["histogram"] == [10]
    assert metrics["nodes_per_token"] == 0.0


@pytest.mark.parametrize("records", [[], [steps([])]], ids=["no request", "one-token answer"])
def test_without_a_pass_nothing_is_made_up(records: list[Steps]) -> None:
    metrics = summarise(records)
    assert metrics["tau"] is None and metrics["tau_macro"] is None and metrics["tau_ci"] is None
    assert metrics["zero_accept_fraction"] is None and metrics["nodes_per_token"] is None
    assert metrics["per_position"] == []
    assert metrics["tokens"] == len(records)
    assert set(equivalents(records).values()) == {None}
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("eos", "eos"), ("stop", "stop"), ("length", "length"), ("context", "length")],
)
def test_truncated_names_what_cut_the_pass(finish: str, reason: str) -> None:
    cut = summarise([steps([(3, 3, 4), (3, 3, 2)], finish=finish)])["truncated"]
    assert cut == {"eos": 0, "stop": 0, "length": 0} | {reason: 1}
    whole = summarise([steps([(3, 3, 4), (3, 1, 2)], finish=finish)])["truncated"]
    assert whole == {"eos": 0, "stop": 0, "length": 0}


def test_equivalents_of_other_projects() -> None:
    record = steps([(3, 3, 4), (3, 0, 1), (3, 3, 2), (0, 0, 1)], finish="eos")
    given = equivalents([record])
    assert given["vllm"] == 1 + 6 / 3, "only passes with drafts; the cut at EOS is not seen"
    assert given["sglang"] == 9 / 4, "output tokens with the prefill's over passes"
    assert given["eagle"] == (4 + 1 + 4 + 1) / 4
    assert given["spec_bench"] == given["eagle"]
    assert summarise([record])["tau"] == 8 / 4


def test_sglang_exceeds_tau_by_one_token_a_request() -> None:
    records = random_records(7)
    metrics, sglang = summarise(records), equivalents(records)["sglang"]
    assert sglang is not None and metrics["tau"] is not None
    assert sglang - metrics["tau"] == pytest.approx(metrics["requests"] / metrics["passes"])


def test_interval_holds_tau_is_seeded_and_clusters_conversations() -> None:
    records = random_records(3, count=40)
    tau = summarise(records)["tau"]
    interval = bootstrap_tau(records, seed=1)
    assert tau is not None and interval is not None
    assert interval[0] < tau < interval[1]
    assert interval == bootstrap_tau(records, seed=1) != bootstrap_tau(records, seed=2)
    assert bootstrap_tau([steps([(1, 1, 2)], id="x#1"), steps([(1, 0, 1)], id="x#2")]) is None
    # Two turns that agree carry no more information than one: the interval must not shrink.
    doubled = [
        Steps(f"{r.id}#{turn}", r.task, 1, r.output_tokens, r.finish_reason, r.passes)
        for r in records
        for turn in (1, 2)
    ]
    assert bootstrap_tau(doubled, seed=1) == pytest.approx(interval)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    depth, rate = 4, 0.6
    truth = sum(rate**i for i in range(depth + 1))
    covered = 0
    for seed in range(60):
        draw = random.Random(seed)
        records = []
        for number in range(30):
            accepted = []
            for _ in range(20):
                a = 0
                while a < depth and draw.random() < rate:
                    a += 1
                accepted.append((depth, a, a + 1))
            records.append(steps(accepted, id=str(number)))
        interval = bootstrap_tau(records, seed=seed, resamples=400)
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert covered >= 50


def test_tasks_keep_their_order_and_add_up() -> None:
    records = [
        steps([(2, 2, 3)], id="1", task="maths"),
        steps([(2, 0, 1), (2, 1, 2)], id="2", task="chat"),
        steps([(2, 1, 2)], id="3", task="maths"),
    ]
    tasks = by_task(records)
    assert list(tasks) == ["maths", "chat"]
    assert sum(metrics["passes"] for metrics in tasks.values()) == summarise(records)["passes"]
    assert tasks["maths"]["tau"] == 5 / 2


def test_same_id_in_two_tasks_is_two_conversations() -> None:
    records = [steps([(1, 1, 2)], id="0", task="a"), steps([(1, 0, 1)], id="0", task="b")]
    assert bootstrap_tau(records) == [1.0, 2.0]


def test_helpers_on_nothing() -> None:
    assert unconditional([]) == [] and conditional([]) == []
    assert unconditional([0, 0]) == []


def test_steps_line_round_trips_and_a_bad_one_is_named() -> None:
    request = Request("7#2", "chat", [1, 2, 3], turn=1, conversation="7")
    passes = [Pass(4, 2, 3, 24), Pass(4, 0, 1, 24)]
    response = Response(request, [5, 6, 7, 8, 9], "eos", passes, 0.1, 0.2, [0.1] * 5)
    record = Steps.of(response)
    line = record.to_json()
    assert line == {
        "id": "7#2",
        "task": "chat",
        "prompt_tokens": 3,
        "output_tokens": 5,
        "finish_reason": "eos",
        "passes": [[4, 2, 3, 24], [4, 0, 1, 24]],
    }
    assert Steps.from_json(json.loads(json.dumps(line))) == record
    assert record.conversation == "chat:7"
    assert summarise([response]) == summarise([record])
    for bad in ({}, line | {"passes": [[1, 2, 3]]}, line | {"passes": [["x", 1, 1, 1]]}):
        with pytest.raises(HeadsmithError, match="steps.jsonl"):
            Steps.from_json(bad)
    with pytest.raises(HeadsmithError, match="finish_reason 'done'"):
        Steps.from_json(line | {"finish_reason": "done"})


def test_phases_add_and_leave_prefill_out_of_decoding() -> None:
    total = Phases(1.0, 2.0, 3.0, 4.0) + Phases(prefill_s=0.5, verify_s=1.0)
    assert total == Phases(1.5, 2.0, 4.0, 4.0)
    assert total.decode_s == 10.0
