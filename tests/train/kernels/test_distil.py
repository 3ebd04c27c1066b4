"""The loss in chunks against the plain dense one: values, choices, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.train.kernels.distil import Chunk, Teacher, distil
from headsmith.train.loss import LossSettings, step_loss

COUNTS = [19, 12, 0, 5]
LOSSES = [LossSettings("kl"), LossSettings("lk", kl_scale=0.7, kl_decay=2.0)]
# Everything at once; ragged rows; ragged columns; both.
CHUNKS = [Chunk(10**6, 10**6), Chunk(7 * 53, 53), Chunk(10**6, 16), Chunk(50, 10)]


class Case:
    """Random states, matrices and slots; the draft ids are every third id."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        target = normal(160, 12)
        last = normal(21, 12)
        self.ids = torch.arange(0, 159, 3)
        self.slots = [torch.randperm(21, generator=g)[:n].sort().values for n in COUNTS]
        logits = self.finish(last @ target.T, None)
        covered = torch.isin(logits.argmax(-1), self.ids)
        assert 0 < covered.sum() < len(covered)
        self.weight = normal(len(self.ids), 8).to(dtype)
        self.states = [normal(n, 8).to(dtype) for n in COUNTS]
        self.teacher = Teacher(
            last.to(dtype), target.to(dtype), self.ids, self.finish, logits.logsumexp(-1), covered
        )

    @staticmethod
    def finish(logits: Tensor, ids: Tensor | slice | None) -> Tensor:
        """A soft cap, as Gemma has."""
        return 5 * torch.tanh(logits / 5)

    def leaves(self) -> tuple[list[Tensor], Tensor]:
        return [
            s.clone().requires_grad_() for s in self.states
        ], self.weight.clone().requires_grad_()

    def chunked(self, loss: LossSettings, scale: Tensor, **options: Any) -> tuple[Any, ...]:
        states, weight = self.leaves()
        sums, choices = distil(states, weight, self.teacher, self.slots, loss, **options)
        (sums * scale.to(sums.dtype)).sum().backward()
        return sums.detach(), choices, [s.grad for s in states], weight.grad

    def dense(self, loss: LossSettings, scale: Tensor) -> tuple[Any, ...]:
        states, weight = self.leaves()
        t, sums, choices = self.teacher, [], []
        wide = [s.double() for s in states], weight.double()
        said = self.finish(t.last.double() @ t.weight.double()[t.ids].T, None)
        for state, slots in zip(wide[0], self.slots, strict=True):
            logits = state @ wide[1].T
            choices.append(logits.argmax(-1))
            sums.append(step_loss(loss, logits, said[slots], t.logsumexp[slots], t.covered[slots]))
        stacked = torch.stack(sums)
        (stacked * scale).sum().backward()
        return stacked.detach(), choices, [s.grad for s in states], weight.grad


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float) -> None:
    assert (found[0] - expected[0]).abs().max() < tolerance * expected[0].abs().max()
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    for a, b in zip([*found[2], found[3]], [*expected[2], expected[3]], strict=True):
        assert a.shape == b.shape
        assert a.numel() == 0 or (a - b).abs().max() < tolerance * max(1.0, float(b.abs().max()))


SCALE = torch.tensor([1.0, 0.8, 0.64, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("chunk", CHUNKS, ids=["whole", "rows", "columns", "both"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("hint", [None, SCALE * 3], ids=["unknown", "known"])
def test_chunks_give_the_dense_loss_and_gradients(
    loss: LossSettings, chunk: Chunk, hint: Tensor | None
) -> None:
    """With `hint` the gradients made in the forward serve; without, the backward makes them."""
    expected = Case().dense(loss, SCALE)
    assert_same(Case().chunked(loss, SCALE, chunk=chunk, weights=hint), expected, 1e-10)
    single = Case(torch.float32).chunked(loss, SCALE, chunk=chunk, weights=hint)
    assert_same(single, expected, 1e-5)


def test_what_is_not_trained_has_no_gradient_and_the_same_loss() -> None:
    case = Case()
    with torch.no_grad():
        sums, _ = distil(case.states, case.weight, case.teacher, case.slots, LOSSES[0])
    assert not sums.requires_grad
    assert torch.allclose(sums, case.dense(LOSSES[0], SCALE)[0])


def test_a_second_backward_gives_the_same() -> None:
    case = Case()
    states, weight = case.leaves()
    sums, _ = distil(states, weight, case.teacher, case.slots, LOSSES[1])
    (sums.sum() * 2).backward(retain_graph=True)
    assert weight.grad is not None
    first = weight.grad.clone()
    sums.sum().backward()
    assert torch.allclose(weight.grad, first * 1.5)


def test_infinite_loss_of_a_row_that_is_not_trained_does_not_count() -> None:
    case = Case()
    far = case.slots[0][~case.teacher.covered[case.slots[0]]][0]
    case.teacher.last[far] *= 1e200
    found, *_ = case.chunked(LOSSES[0], SCALE)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_autocast_is_no_worse_than_the_dense_loss_in_bfloat16(loss: LossSettings) -> None:
    ours = theirs = 0.0
    for seed in range(10):
        case, exact = Case(torch.float32, seed), Case(seed=seed).dense(loss, SCALE)[3]
        states, weight = case.leaves()
        plain_states, plain_weight = case.leaves()
        t = case.teacher
        with torch.autocast("cpu", torch.bfloat16):
            sums, _ = distil(states, weight, t, case.slots, loss, SCALE)
            (sums * SCALE).sum().backward()
            said = case.finish((t.last @ t.weight[t.ids].T).float(), None)
            plain = [
                step_loss(loss, s @ plain_weight.T, said[i], t.logsumexp[i].float(), t.covered[i])
                for s, i in zip(plain_states, case.slots, strict=True)
            ]
            (torch.stack(plain) * SCALE).sum().backward()
        assert weight.grad is not None and plain_weight.grad is not None
        ours += float((weight.grad - exact).square().sum())
        theirs += float((plain_weight.grad - exact).square().sum())
    assert ours < 1.1 * theirs


def test_rows_of_the_teacher_are_kept_where_they_are_one_chunk() -> None:
    case, scale = Case(), torch.ones(len(COUNTS), dtype=torch.float64)
    expected = case.chunked(LOSSES[0], scale)
    case.teacher = replace(case.teacher, kept={})
    case.chunked(LOSSES[0], scale)
    # Read no more: the second step has all from the first.
    spoilt = replace(case.teacher, weight=torch.full_like(case.teacher.weight, torch.nan))
    case.teacher = spoilt
    found = case.chunked(LOSSES[0], scale)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[3], expected[3])
    many = replace(spoilt, kept={})
    case.teacher = many
    assert case.chunked(LOSSES[0], scale, chunk=Chunk(64, 16))[0].isnan().any()
    assert many.kept == {}
