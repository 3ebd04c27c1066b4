"""The loss and its gradient do not depend on packing, accumulation or order of work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target
from headsmith.train.batches import Batches, make_batches, share
from headsmith.train.features import Features
from headsmith.train.optimiser import build_optimisers, rate_factor, set_rates
from headsmith.train.recipe import Recipe
from headsmith.train.step import Stepper, Unroll


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir, dtype=torch.float64)


@pytest.fixture(scope="module")
def documents() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "loss_mask": []}
    for length in (23, 40, 9, 31, 17, 28):
        columns["input_ids"].append(torch.randint(256, (length,), generator=generator).tolist())
        # From the second token on, with a prompt in the middle.
        mask = [0] + [1] * (length - 1)
        mask[length // 2] = 0
        columns["loss_mask"].append(mask)
    return Dataset.from_dict(columns).with_format("numpy")


def recipe(**train: Any) -> Recipe:
    row_tokens = train.pop("row_tokens", 256)
    given = {"tokens_per_step": 10**6, "unroll_steps": 3, **train}
    data = {"source": "x", "max_length": 4, "row_tokens": row_tokens}
    return Recipe.model_validate({"target": {"path": "x"}, "data": data, "train": given})


@pytest.fixture
def stepper(target: Target, documents: Dataset) -> Callable[..., Stepper]:
    def make(**train: Any) -> Stepper:
        settings = recipe(**train)
        head = Eagle3Head.for_target(target, torch.arange(0, 250), norm_output=True).double()
        optimisers = [torch.optim.SGD(head.parameters(), lr=1e-3)]
        model = Unroll(head, target, settings.train)
        batches = make_batches(documents, settings)
        features = Features(target, head, batches)
        return Stepper(Accelerator(cpu=True), features, model, optimisers, settings.train)

    return make


def test_packed_unpacked_and_accumulated_steps_agree(stepper: Callable[..., Stepper]) -> None:
    one_row, unpacked, some = stepper(), stepper(row_tokens=4), stepper(row_tokens=60)
    assert [len(s.batches.documents) for s in (one_row, unpacked, some)] == [1, 6, 3]
    records = [s.run(0)[0] for s in (one_row, unpacked, some)]
    for record in records[1:]:
        assert record["rows"] == records[0]["rows"]
        for key in ("loss", "losses", "gradient_norm", "accuracy", "joint", "covered"):
            assert record[key] == pytest.approx(records[0][key], rel=1e-9), key
    weights = [s.head.fc.weight for s in (one_row, unpacked, some)]
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=1e-12)
    assert torch.allclose(weights[0], weights[2], rtol=0, atol=1e-12)


def test_logged_loss_is_the_trained_loss(stepper: Callable[..., Stepper]) -> None:
    record, _ = stepper(step_decay=0.5).run(0)
    first, second, third = record["losses"]
    assert record["loss"] == pytest.approx(first + 0.5 * second + 0.25 * third)


def test_kept_features_change_nothing(stepper: Callable[..., Stepper]) -> None:
    kept, computed = stepper(row_tokens=60), stepper(row_tokens=60)
    kept.features.keep = True
    for step in (0, 0):
        ours, theirs = kept.run(step)[0], computed.run(step)[0]
        assert ours["losses"] == theirs["losses"]
    assert len(kept.features.kept) == 3 and not computed.features.kept


def test_weights_that_hold_nan_stop_the_run_and_name_the_row(
    stepper: Callable[..., Stepper],
) -> None:
    one = stepper(row_tokens=4)
    with torch.no_grad():
        one.head.fc.weight[0, 0] = float("nan")
    with pytest.raises(HeadsmithError, match=r"the loss of packed row \d+ \(conversations \d+"):
        one.run(0)


def test_target_states_that_hold_nan_stop_the_run_and_name_the_row(
    stepper: Callable[..., Stepper], target: Target
) -> None:
    one = stepper(row_tokens=4)
    norm = target.model.get_decoder().norm.weight
    before = norm[0].item()
    try:
        with torch.no_grad():
            norm[0] = float("inf")
        with pytest.raises(HeadsmithError, match=r"states of packed row \d+ .* hold NaN"):
            one.run(0)
    finally:
        with torch.no_grad():
            norm[0] = before


def test_a_row_without_later_loss_rows_trains(stepper: Callable[..., Stepper]) -> None:
    one = stepper(unroll_steps=12, row_tokens=4)
    assert (one.batches.counts == 0).any()
    record, _ = one.run(0)
    assert record["rows"][0] > record["rows"][-1] > 0


def batches_of(documents: Dataset, **train: Any) -> Batches:
    return make_batches(documents, recipe(**train))


def test_each_epoch_visits_every_row_once_in_another_order(documents: Dataset) -> None:
    batches = batches_of(documents, row_tokens=4, tokens_per_step=50, epochs=3)
    assert batches.steps_per_epoch == 3 and batches.total_steps == 9
    visited = [[r for i in range(3) for r in batches.step_rows(3 * e + i)] for e in range(3)]
    assert all(sorted(rows) == list(range(6)) for rows in visited)
    assert visited[0] != visited[1] != visited[2]
    assert batches.position(7) == (2, 1)


def test_max_steps_ends_the_run_and_its_schedule(documents: Dataset) -> None:
    batches = batches_of(documents, row_tokens=4, tokens_per_step=50, epochs=4, max_steps=3)
    assert batches.total_steps == 3


def test_a_step_never_asks_for_more_rows_than_there_are(documents: Dataset) -> None:
    batches = batches_of(documents, row_tokens=4, tokens_per_step=1)
    assert batches.steps_per_epoch == 6


def test_rows_without_a_loss_row_are_dropped_and_counted() -> None:
    columns = {"input_ids": [[1] * 9, [2] * 9], "loss_mask": [[0] * 9, [1] * 9]}
    documents = Dataset.from_dict(columns).with_format("numpy")
    batches = batches_of(documents, row_tokens=9)
    assert batches.dropped == 1 and batches.documents == [[1]]
    with pytest.raises(HeadsmithError, match="none of the 1 conversations"):
        batches_of(documents.select([0]), row_tokens=9)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares_cover_the_rows_and_are_equally_many(world: int) -> None:
    rows = [16, 4, 8, 15]
    tokens = [100 + row for row in range(20)]
    shares = [share(rows, rank, world, tokens) for rank in range(world)]
    assert len({len(one) for one in shares}) == 1
    counted = [row for one in shares for row, weight in one if weight]
    assert sorted(counted) == sorted(rows)
    # What is computed for nothing is the least that there is.
    assert {row for one in shares for row, weight in one if not weight} <= {4}
    if world == 1:
        assert counted == rows


@pytest.mark.parametrize("world", [2, 4])
def test_shares_hold_equally_many_tokens(world: int) -> None:
    generator = torch.Generator().manual_seed(world)
    tokens = torch.randint(200, 513, (64,), generator=generator).tolist()
    rows = torch.randperm(64, generator=generator).tolist()
    held = [
        sum(tokens[row] for row, weight in share(rows, rank, world, tokens) if weight)
        for rank in range(world)
    ]
    by_turns = [sum(tokens[row] for row in rows[rank::world]) for rank in range(world)]
    assert sum(held) == sum(tokens)
    assert max(held) - min(held) <= 0.005 * sum(tokens) / world
    assert max(held) - min(held) < max(by_turns) - min(by_turns)


def test_rate_rises_then_falls_and_is_never_zero() -> None:
    factors = [rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10:] == sorted(factors[10:], reverse=True) and max(factors) == 1.0
    assert min(factors) > 0
    assert rate_factor(0, 1, 0.0) == 1.0 and rate_factor(0, 1, 1.0) == 1.0


def test_weight_decay_is_for_matrices_and_groups_may_scale_the_rate() -> None:
    settings = recipe(weight_decay=0.1, learning_rate=0.5).train
    (adam,) = build_optimisers(torch.nn.Linear(3, 2), settings)
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0]
    adam.param_groups[1]["scale"] = 10.0
    assert set_rates([adam], settings, 0.5) == 0.25
    assert [group["lr"] for group in adam.param_groups] == [0.25, 2.5]


def test_what_reads_raw_taps_moves_in_proportion_to_its_size(target: Target) -> None:
    head = Eagle3Head.for_target(target, torch.arange(50))
    with torch.no_grad():
        head.fc.weight.mul_(0.5)  # a fresh one has nearly the full size, which is the most
    (before,) = build_optimisers(head, recipe().train)
    assert before.param_groups[-1]["params"] == [head.fc.weight]
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
    (after,) = build_optimisers(head, recipe().train)
    scales = [adam.param_groups[-1]["scale"] for adam in (before, after)]
    assert scales[1] == pytest.approx(0.1 * scales[0]) and 0 < scales[1] < scales[0] < 1
    counted = [p for group in after.param_groups for p in group["params"]]
    assert len(counted) == len(list(head.parameters()))
