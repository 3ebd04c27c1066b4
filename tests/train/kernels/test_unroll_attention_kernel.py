"""The kernels of unroll attention in the interpreter, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.train.kernels.unroll_attention import (
    Layout,
    reference_backward,
    reference_forward,
)

pytestmark = pytest.mark.usefixtures("interpreted")

# Documents that end inside of a tile, at its edge and in the next one; 97 tokens.
LENGTHS = [5, 27, 32, 1, 32]
# The last query of all stands alone in its tile, and its own key in the next tile of keys.
EDGES = [33, 31, 33]


def case(
    group: int, size: int, later: int, dtype: torch.dtype, window: int | None, lengths: list[int]
) -> Any:
    g = torch.Generator().manual_seed(group * size + later)
    share = 1.0 if lengths is EDGES else 0.5
    rows = (torch.rand(97, generator=g) < share).nonzero().flatten()
    n = len(rows)
    shapes = [(2 * group, n, size), (2, 97, size), (2, 97, size)] + [(later, 2, n, size)] * 2
    tensors = [torch.randn(s, generator=g).to(dtype) for s in [*shapes, shapes[0]]]
    return tensors[:-1], tensors[-1], Layout(rows, lengths, window)


def everything(forward: Any, backward: Any, given: Any, dtype: torch.dtype) -> list[Tensor]:
    """Output, log-sum-exp and the five gradients."""
    tensors, grad, layout = given
    tensors, grad = [t.to(dtype) for t in tensors], grad.to(dtype)
    out, lse = forward(*tensors, layout)
    delta = (grad.to(lse.dtype) * out).sum(-1)
    return [out, lse, *backward(*tensors, lse, delta, grad, layout)]


def both(
    group: int,
    size: int,
    later: int,
    dtype: torch.dtype,
    window: int | None = None,
    lengths: list[int] = LENGTHS,
) -> Any:
    from headsmith.train.kernels.unroll_attention_launch import launch_backward, launch_forward

    given = case(group, size, later, dtype, window, lengths)
    exact = everything(reference_forward, reference_backward, given, torch.float64)
    return everything(launch_forward, launch_backward, given, dtype), exact, given


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found - exact).abs().max()) if found.numel() else 0.0


@pytest.mark.parametrize(
    ("group", "size", "later", "window"),
    [(1, 64, 0, None), (3, 64, 2, None), (4, 96, 1, None), (8, 128, 3, None), (2, 64, 3, 7)],
)
def test_the_kernels_agree_with_the_reference(
    group: int, size: int, later: int, window: int | None
) -> None:
    lengths = EDGES if group == 1 else LENGTHS
    found, exact, _ = both(group, size, later, torch.float32, window, lengths)
    for a, b in zip(found, exact, strict=True):
        assert error(a, b) < 1e-5 * max(1.0, float(b.abs().max()) if b.numel() else 1.0)


def test_bfloat16_is_no_worse_than_the_reference() -> None:
    found, exact, given = both(3, 64, 2, torch.bfloat16)
    plain = everything(reference_forward, reference_backward, given, torch.bfloat16)
    for a, b, e in zip(found, plain, exact, strict=True):
        assert (a - e).norm() <= 1.05 * (b - e).norm() + 1e-6


WRONG = [
    # The mask off by one, either way; another document's keys.
    ("(column[None, :] <= row[:, None])", "(column[None, :] < row[:, None])"),
    ("(column[None, :] <= row[:, None])", "(column[None, :] <= row[:, None] + 1)"),
    ("(column[None, :] >= start[:, None])", "(column[None, :] >= 0)"),
    # The last key of a tile of queries; the documents before the tile's last.
    ("+ BLOCK_M, count) - 1) + 1", "+ BLOCK_M, count) - 1)"),
    ("low = tl.load(starts + block * BLOCK_M)", "low = tl.load(rows + block * BLOCK_M)"),
    # Rows of padding that hold something stale and are seen.
    (
        "seen = _seen(row, start, column, later, window, WINDOW)\n            weights",
        "seen = _seen(row, start, column, later, window, WINDOW) | (row < 0)[:, None]\n"
        "            do = tl.where(live[:, None], do, 1.0)\n            weights",
    ),
    # The keys of another step.
    ("at = (tl.program_id(2) * HEADS + group)", "at = (0 * HEADS + group)"),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_wrong_kernel_is_caught(
    old: str,
    new: str,
    mutant: Callable[[ModuleType, str, str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headsmith.train.kernels import unroll_attention_launch, unroll_attention_triton

    wrong = mutant(unroll_attention_triton, old, new)
    for name in ("forward_kernel", "query_kernel", "key_kernel", "own_kernel"):
        monkeypatch.setattr(unroll_attention_launch, name, getattr(wrong, name))
    found, exact, _ = both(1, 64, 2, torch.float32, lengths=EDGES)
    errors = [error(a, b) for a, b in zip(found, exact, strict=True)]
    assert not max(errors) < 1e-3
