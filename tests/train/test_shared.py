"""Matrices and tables that steps share: the gradient is autograd's, and added up in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headsmith.train.shared import Shared, SharedTable


def parts(dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Two weights, and what three steps multiply them with."""
    g = torch.Generator().manual_seed(0)
    first, second = (torch.randn(n, 8, generator=g).to(dtype).requires_grad_() for n in (5, 6))
    return first, second, [torch.randn(n, 8, generator=g).to(dtype) for n in (9, 7, 4)]


@pytest.mark.parametrize("rows", [slice(None), slice(0, 5), slice(5, None)])
def test_the_gradients_of_all_steps(rows: slice) -> None:
    first, second, inputs = parts(torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    shared = Shared(first, second)
    loss = sum(shared(x, rows).pow(3).sum() + shared(x).sum() for x in inputs)
    made = torch.autograd.grad(loss, [first, second, *inputs])
    whole = torch.cat((first, second))
    loss = sum((x @ whole[rows].T).pow(3).sum() + (x @ whole.T).sum() for x in inputs)
    right = torch.autograd.grad(loss, [first, second, *inputs])
    assert all((a - b).abs().max() < 1e-9 for a, b in zip(made, right, strict=True))


def test_narrow_products_are_added_up_in_float32() -> None:
    """A thousand steps of 2^-9 beside one of 1: in bfloat16 the sum would stay where it began."""
    weight = torch.ones(4, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        shared = Shared(weight)
        out = [shared(torch.ones(1, 3) * size) for size in (1.0, *[2**-9] * 1000)]
    assert out[0].dtype == torch.bfloat16
    torch.cat(out).float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, torch.full((4, 3), 1 + 1000 * 2**-9), rtol=1e-6, atol=0)


def test_a_frozen_weight_has_no_gradient_and_lets_others_through() -> None:
    first, _, inputs = parts(torch.float32)
    x = inputs[0].requires_grad_()
    Shared(first.detach())(x).sum().backward()
    assert x.grad is not None and first.grad is None


def test_a_weight_that_no_step_used() -> None:
    first, second, inputs = parts(torch.float32)
    Shared(first)
    Shared(second)(inputs[0]).sum().backward()
    assert first.grad is None and second.grad is not None


def test_what_is_gathered_gets_its_gradient_back() -> None:
    table = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    places = [torch.tensor([0, 2, 5]), torch.tensor([5, 1])]
    shared = SharedTable(table * 2)
    sum(shared(rows).pow(2).sum() for rows in places).backward()
    made, table.grad = table.grad, None
    sum((table * 2)[rows].pow(2).sum() for rows in places).backward()
    torch.testing.assert_close(made, table.grad)
