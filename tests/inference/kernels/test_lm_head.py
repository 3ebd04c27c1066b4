"""The output matrix: the kernels' best ids, their logits and log-sum-exp against all logits."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from headsmith.inference.kernels.lm_head import Best, best_tokens, reference

# Neither is a multiple of a tile.
WIDTH, VOCAB = 72, 300


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    """The likeliest ids of the last rows lie at the edges: first, last, and around a tile's end."""
    x, weight = random(rows, WIDTH, seed=rows), random(VOCAB, WIDTH, seed=1) * 0.3
    for row, column in enumerate([VOCAB - 1, 0, 63, 64, 127, 128, 255, 256][:rows]):
        weight[column] = x[row] * 0.5
    return x, weight


def check(found: Best, logits: Tensor, k: int, ids: Tensor | None = None) -> None:
    """Against all logits in float64."""
    values, columns = logits.topk(k)
    torch.testing.assert_close(found.logits.double(), values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse.double(), logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(found.ids, columns if ids is None else ids[columns])


@pytest.mark.parametrize("rows", [1, 5, 17, 64])
@pytest.mark.parametrize("k", [1, 10])
def test_best_of_every_row(rows: int, k: int) -> None:
    x, weight = inputs(rows)
    logits = x.double() @ weight.double().T
    ids = torch.arange(VOCAB) * 7 + 3 if k > 1 else None
    check(best_tokens(x, weight, k, ids), logits, k, ids)
    check(reference(x, weight, k, ids), logits, k, ids)


@pytest.mark.parametrize("rows", [5, 33])
def test_bfloat16_is_no_worse_than_the_reference(rows: int, no_worse: Callable[..., None]) -> None:
    x, weight = (t.bfloat16() for t in inputs(rows))
    logits = x.double() @ weight.double().T
    found, plain = best_tokens(x, weight, 4), reference(x, weight, 4)
    no_worse(found.logits, plain.logits, logits.topk(4).values)
    no_worse(found.lse, plain.lse, logits.logsumexp(-1))
    # float32 sums: the order of ids is that of the exact logits.
    assert torch.equal(found.ids, logits.topk(4).indices)


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    x, weight = inputs(3)
    twins = [17, 70, 130, 299]
    weight[twins] = x[1] * 2
    for found in (best_tokens(x, weight, 5), reference(x, weight, 5)):
        assert found.ids[1, :4].tolist() == twins


def test_fewer_ids_in_a_tile_than_are_wanted() -> None:
    x, weight = inputs(2)
    x, weight = x, weight[:66]
    check(best_tokens(x, weight, 8), x.double() @ weight.double().T, 8)


WRONG = {
    "ids beyond the vocabulary": (
        "logits = tl.where(real[None, :], logits,",
        "logits = tl.where(real[None, :] | True, logits,",
    ),
    "the last id of a tile": ("here[None, :] == where", "here[None, :] == 1 + where"),
    "the last tile": ("mask=tile < tiles, other=0.0", "mask=tile < tiles - 1, other=0.0"),
    "the edge of the width": (
        "inside = k + ahead < WIDTH",
        "inside = k + ahead < WIDTH - 1",
    ),
    "ids not mapped": ("column = tl.load(ids + column)", "column = column"),
    "candidates of the last tile": ("candidate < tiles * K", "candidate < (tiles - 1) * K"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught(
    name: str, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    from headsmith.inference.kernels import lm_head_triton

    x, weight = inputs(5)
    # All logits of the second row are negative: a zero of nowhere would win.
    x[1] = -x[1].abs()
    weight = weight.abs() * torch.where(torch.arange(WIDTH) < WIDTH // 2, 1.0, 0.9)
    ids = torch.arange(VOCAB).flip(0).contiguous()
    logits = x.double() @ weight.double().T
    check(best_tokens(x, weight, 5, ids), logits, 5, ids)
    wrong = mutant(lm_head_triton, *WRONG[name])
    with pytest.raises(AssertionError):
        check(wrong.launch(x, weight, 5, ids), logits, 5, ids)
