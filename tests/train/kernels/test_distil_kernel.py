"""The kernel of the loss in the interpreter, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import ModuleType

import pytest
import torch
from torch import Tensor

from headsmith.train.kernels.distil_rows import Parts, Rows, reference, visit
from headsmith.train.loss import LossSettings

pytestmark = pytest.mark.usefixtures("interpreted")
LOSSES = [LossSettings("kl"), LossSettings("lk", kl_scale=0.7, kl_decay=2.0)]
# One visit that does everything, and the visits of several chunks of columns.
WHOLE = [Parts(True, True, True)]
APART = [Parts(statistics=True), Parts(sums=True), Parts(gradient=True)]
# Columns: inside of a block, at its edge, behind it; five of 16 and some.
COLUMNS = [5, 16, 17, 85]


def run(
    visit: Callable[..., Tensor],
    loss: LossSettings,
    visits: list[Parts],
    cut: int,
    columns: int,
    dtype: torch.dtype,
) -> tuple[Rows, Tensor]:
    """Seven rows of two chunks, columns up to `cut` and behind; all gradients [7, columns]."""
    g = torch.Generator().manual_seed(columns)
    logits = torch.randn(7, columns, generator=g, dtype=torch.float64) * 3
    teacher = torch.randn(4, columns, generator=g, dtype=torch.float64) * 3
    logits, teacher = logits.bfloat16().to(dtype), teacher.bfloat16()
    logits[2, 1] = logits[2, 3] = logits[2].max() + 1  # two best ones
    slots = torch.tensor([0, 0, 1, 2, 2, 3, 3])
    exact = torch.promote_types(dtype, torch.float32)
    full = (teacher.double().logsumexp(-1)[slots] + 0.3).to(exact)
    covered = torch.tensor([1, 1, 0, 1, 1, 0, 1]).to(exact)
    rows = Rows.begin(full, covered, torch.linspace(0.5, 2, 7).to(exact))
    found = []
    for parts in visits:
        found = [
            visit(
                logits[:, part].clone().contiguous(),
                teacher[:, part].to(exact).contiguous(),
                slots,
                rows,
                part.start,
                loss,
                parts,
            )
            for part in (slice(0, cut), slice(cut, columns))
            if part.stop > part.start
        ]
    return rows, torch.cat(found, 1)


@pytest.fixture(autouse=True)
def small_blocks(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from headsmith.train.kernels import distil_rows_triton

    monkeypatch.setattr(distil_rows_triton, "BLOCK", 16)


def furthest(found: tuple[Rows, Tensor], exact: tuple[Rows, Tensor]) -> float:
    """The largest error relative to the largest number; infinite for another choice."""
    if not torch.equal(found[0].choice, exact[0].choice):
        return float("inf")
    pairs = [
        (getattr(found[0], f.name), getattr(exact[0], f.name))
        for f in fields(Rows)
        if f.name != "choice"
    ]
    scaled = [
        float((a - b).abs().max() / b.abs().max().clamp(min=1))
        for a, b in [*pairs, found[1:] + exact[1:]]
    ]
    return max(scaled)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_the_kernel_agrees_with_the_reference(loss: LossSettings, columns: int) -> None:
    for visits, cut in ((WHOLE, columns), (APART, columns), (APART, columns * 2 // 3)):
        exact = run(reference, loss, visits, cut, columns, torch.float64)
        assert furthest(run(visit, loss, visits, cut, columns, torch.float32), exact) < 1e-5


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_bfloat16_is_no_worse_than_the_reference(loss: LossSettings) -> None:
    _, exact = run(reference, loss, WHOLE, 85, 85, torch.float64)
    _, plain = run(reference, loss, WHOLE, 85, 85, torch.bfloat16)
    _, ours = run(visit, loss, WHOLE, 85, 85, torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.001 * (plain.bfloat16() - exact).norm()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Columns behind the last one, of which the mask makes zeros.
        ("gain += tl.where(real, p * (log_p - log_q), 0.0)", "gain += p * (log_p - log_q)"),
        ("low += tl.where(real & (q < p * rest), q, 0.0)", "low += tl.where(q < p * rest, q, 0.0)"),
        # The second chunk's columns counted from 0.
        ("(column + first).to(tl.int64)", "column.to(tl.int64)"),
        # Of equal logits the last.
        (
            "tl.min(tl.where(top == peak, where, columns), 0)",
            "tl.max(tl.where(top == peak, where, 0), 0)",
        ),
        # A chunk that forgets the one before.
        ("own = _merge(own, peak,", "own = _merge(float('-inf'), peak,"),
        ("tl.load(kl + row) + tl.sum(gain, 0)", "tl.sum(gain, 0)"),
    ],
)
def test_a_wrong_kernel_is_caught(
    old: str, new: str, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    from headsmith.train.kernels import distil_rows_triton

    wrong = mutant(distil_rows_triton, old, new)
    wrong.BLOCK = 16  # type: ignore[attr-defined]
    exact = run(reference, LOSSES[1], APART, 40, 85, torch.float64)
    assert not furthest(run(wrong.launch, LOSSES[1], APART, 40, 85, torch.float32), exact) < 1e-4
