"""Drift: the recorder changes nothing, its weights are the drafter's, its figures are by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference import diagnose, drafters
from headsmith.inference.diagnose import (
    FIGURES,
    SINK_TOKENS,
    DriftRecorder,
    check_diagnosis,
    measure_drift,
)
from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.engine import Decoder
from headsmith.inference.metrics import summarise
from headsmith.inference.records import Request
from headsmith.inference.tree import Chain, Tree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.spans import Span
from headsmith.models.target import Target

DEPTH = 5
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "window": {"sliding_window": 7},
}


def make_head(target: Target, **flags: Any) -> Eagle3Head:
    """A random float64 head with opinions."""
    config = Eagle3Config.for_target(target, target.vocab_size, taps=(1, 3))
    head = Eagle3Head(replace(config, **flags), torch.arange(target.vocab_size)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.3, generator=generator)
    return head.requires_grad_(False)


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, small_target: Target) -> Eagle3Head:
    return make_head(small_target, **KINDS[request.param])


class Spied(DriftRecorder):
    """Keeps what `look` found."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found: list[tuple[Tensor, Tensor]] = []

    def look(self, tokens: Tensor, z: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        self.found.append(super().look(tokens, z, span))
        return self.found[-1]


def test_weights_sum_to_one_and_give_what_the_drafter_used(
    small_target: Target,
    head: Eagle3Head,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Tensor] = []
    attend = drafters.ragged_attention

    def spy(*arguments: Any, **options: Any) -> Tensor:
        used.append(attend(*arguments, **options))
        return used[-1]

    monkeypatch.setattr(drafters, "ragged_attention", spy)
    recorder = Spied(head, small_target, DEPTH)
    Decoder(small_target, recorder, max_new_tokens=12).generate(requests)
    assert len(recorder.found) == len(used) == DEPTH * len(recorder.passes) > 50
    for (weights, output), expected in zip(recorder.found, used, strict=True):
        assert weights.shape[:2] == expected.shape[:2] == (4, 1)
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, 1).double(), rtol=0, atol=1e-12)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)


def test_the_drafts_are_those_of_the_plain_drafter(
    small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    found = []
    for drafter in (
        EagleDrafter(head, small_target, Chain(DEPTH)),
        DriftRecorder(head, small_target, DEPTH),
    ):
        proposed: list[list[int]] = []
        propose = drafter.propose

        def keep(updates: list[Update], propose: Any = propose, to: Any = proposed) -> Any:
            trees = propose(updates)
            to += [tree.tokens for tree in trees]
            return trees

        drafter.propose = keep  # type: ignore[method-assign, assignment]
        responses, _ = Decoder(small_target, drafter, max_new_tokens=12).generate(requests)
        found.append((proposed, [(r.output_ids, r.passes) for r in responses]))
    assert found[0] == found[1] and len(found[0][0]) > 20


def first_pass(
    head: Eagle3Head, target: Target, request: Request, depth: int = DEPTH
) -> tuple[DriftRecorder, Update]:
    ids = torch.tensor(request.prompt_ids)
    taps = target.features(ids, [len(ids)], head.taps).taps.clone()
    update = Update(0, [*request.prompt_ids[1:], 7], taps)
    recorder = DriftRecorder(head, target, depth)
    recorder.reset(1, len(ids) + depth + 1)
    recorder.propose([update])
    return recorder, update


def test_shares_of_even_attention_are_counts_of_rows(
    small_target: Target, requests: list[Request]
) -> None:
    """A head whose queries are zero attends to all rows alike."""
    head = make_head(small_target)
    head.midlayer.self_attn.q_proj.weight.zero_()
    recorder, update = first_pass(head, small_target, requests[1])
    (seen,) = recorder.passes
    rows = len(update.tokens)
    assert rows == 17 and seen.committed == 18 and SINK_TOKENS == 4
    for depth, figures in enumerate(seen.figures, start=1):
        _, _, sink, text, own = figures.tolist()
        total = rows + depth - 1
        expected = (4 / total, (rows - 4) / total, (depth - 1) / total)
        assert (sink, text, own) == pytest.approx(expected, abs=1e-6)


def test_shares_within_a_window_and_of_a_short_prompt(
    small_target: Target, requests: list[Request]
) -> None:
    head = make_head(small_target, sliding_window=7)
    head.midlayer.self_attn.q_proj.weight.zero_()
    (seen,) = first_pass(head, small_target, requests[1])[0].passes
    # The sink is out of sight, and of the seven latest rows depth - 1 are drafts.
    expected = torch.tensor([[0, (8 - d) / 7, (d - 1) / 7] for d in range(1, DEPTH + 1)])
    torch.testing.assert_close(seen.figures[:, 2:], expected, rtol=0, atol=1e-6)
    (short,) = first_pass(head, small_target, requests[0])[0].passes
    assert short.figures[0, 2:].tolist() == pytest.approx([1, 0, 0]), "three rows, all of them sink"
    assert short.figures[1, 2:].tolist() == pytest.approx([3 / 4, 0, 1 / 4])


def test_sizes_are_those_of_the_states(
    small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    recorder, update = first_pass(head, small_target, requests[1])
    states, outputs = recorder.passes[0].figures[:, 0], recorder.passes[0].figures[:, 1]
    fused = head.fuse(update.taps)[-1]
    assert float(states[0]) == pytest.approx(float(fused.square().mean().sqrt()), rel=1e-5)
    # EAGLE-3 reads the row before as it is, EAGLE-3.1 its norm, whose weights are all one here.
    fed_back = torch.ones(DEPTH - 1) if head.config.norm_output else outputs[:-1]
    torch.testing.assert_close(states[1:], fed_back, rtol=1e-3, atol=0)
    assert len(set(outputs.tolist())) == DEPTH


def test_rows_are_means_and_c_is_that_of_the_metrics(
    small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    drift = measure_drift(small_target, head, requests, depth=DEPTH, max_new_tokens=30)
    rows = drift["rows"]
    assert drift["draft"] == "chain:5" and [row["depth"] for row in rows] == [1, 2, 3, 4, 5]
    assert {row["context"] for row in rows} == {"0-127"}
    for row in rows:
        shares = [row[f"attention_{part}"] for part in ("sink", "text", "own")]
        assert sum(shares) == pytest.approx(1, abs=1e-5) and min(shares) >= 0
        assert (row["attention_own"] == 0) == (row["depth"] == 1)
    drafter = EagleDrafter(head, small_target, Chain(DEPTH))
    responses, _ = Decoder(small_target, drafter, max_new_tokens=30).generate(requests)
    metrics = summarise(responses)
    assert [row["conditional"] for row in rows] == metrics["conditional"]
    assert {row["passes"] for row in rows} == {metrics["passes"]} == {rows[0]["reached"]}
    reached = [rows[0]["passes"], *(u * metrics["passes"] for u in metrics["per_position"][:-1])]
    assert [row["reached"] for row in rows] == pytest.approx(reached)


def test_c_counts_what_was_accepted(
    small_target: Target,
    requests: list[Request],
    knowing: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With drafts that are right 0, 2, 1, 3 times in turn, whatever the head would have drafted."""
    truth = knowing.Scripted(Chain(4))
    truth.reset(1, 99)

    class Told(DriftRecorder):
        def release(self, slot: int) -> None:
            truth.release(slot)
            super().release(slot)

        def propose(self, updates: Sequence[Update]) -> list[Tree]:
            super().propose(updates)
            return truth.propose(updates)

    monkeypatch.setattr(diagnose, "DriftRecorder", Told)
    head = make_head(small_target)
    drift = measure_drift(small_target, head, requests, depth=4, max_new_tokens=30)
    accepted = [truth.counts[i % 4] for i in range(truth.passes)]
    for row in drift["rows"]:
        reached = sum(count >= row["depth"] - 1 for count in accepted)
        right = sum(count >= row["depth"] for count in accepted)
        assert row["reached"] == reached > 0 and row["passes"] == len(accepted) > 40
        assert row["conditional"] == pytest.approx(right / reached)


def test_passes_are_grouped_by_what_was_committed(
    small_target: Target, requests: list[Request]
) -> None:
    head = make_head(small_target)
    longer = Request("long", "task", (requests[1].prompt_ids * 9)[:120])
    drift = measure_drift(small_target, head, [longer], depth=2, max_new_tokens=30)
    contexts = dict.fromkeys(row["context"] for row in drift["rows"])
    assert list(contexts) == ["0-127", "128-255"]
    means = {row["context"]: row["mean_context"] for row in drift["rows"]}
    assert 121 <= means["0-127"] < 128 <= means["128-255"] <= 150


def test_passes_are_grouped_by_the_length_prompts_were_brought_to(
    small_target: Target, requests: list[Request]
) -> None:
    head = make_head(small_target)
    some = [replace(one, task=f"a@{9 + i % 2 * 90}") for i, one in enumerate(requests)]
    drift = measure_drift(small_target, head, some, depth=2, max_new_tokens=5, brought=True)
    assert [row["context"] for row in drift["rows"]] == ["9", "9", "99", "99"]
    alone = measure_drift(small_target, head, some[1::2], depth=2, max_new_tokens=5, brought=True)
    for mine, other in zip(drift["rows"][2:], alone["rows"], strict=True):
        assert [mine[key] for key in FIGURES] == pytest.approx([other[key] for key in FIGURES])
        same = mine.keys() - set(FIGURES)
        assert {key: mine[key] for key in same} == {key: other[key] for key in same}


def test_chains_that_the_context_cut_short_do_not_count(
    small_target: Target, requests: list[Request]
) -> None:
    head = make_head(small_target)
    full = Request("full", "task", (requests[1].prompt_ids * 20)[:250])
    drift = measure_drift(small_target, head, [full], depth=5, max_new_tokens=30)
    responses, _ = Decoder(
        small_target, EagleDrafter(head, small_target, Chain(5)), max_new_tokens=30
    ).generate([full])
    whole = [one for one in responses[0].passes if one.proposed == 5]
    assert len(whole) < len(responses[0].passes)
    assert [row["passes"] for row in drift["rows"]] == [len(whole)] * (5 if whole else 0)


def test_other_heads_have_nothing_to_diagnose() -> None:
    with pytest.raises(HeadsmithError, match="this head, of kind object, has"):
        check_diagnosis(object())
