"""Products by either library are the same, and the other library is taken only where it may be."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headsmith.errors import HeadsmithError
from headsmith.models import products
from headsmith.models.linear import PackedLinear, pack_linears, packing_helps
from headsmith.models.products import (
    Buffer,
    Linear,
    WeightGradient,
    add_product,
    linear,
    product,
)


@pytest.fixture(params=["torch", "numpy"])
def library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> str:
    """Either of them, for products of every size."""
    monkeypatch.setenv(products.VARIABLE, request.param)
    monkeypatch.setattr(products, "_LEAST", 1)
    assert products.library() == request.param
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every product that numpy makes from here on."""
    found, matmul = [], numpy.matmul

    def counting(a: Any, b: Any, **how: Any) -> Any:
        found.append((*a.shape, b.shape[1]))
        return matmul(a, b, **how)

    monkeypatch.setattr(numpy, "matmul", counting)
    return found


def matrices() -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs as training has them: whole, transposed, columns of a wider matrix, a single row."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return {
        "whole": (normal(17, 33), normal(33, 29)),
        "right transposed": (normal(17, 33), normal(29, 33).T),
        "left transposed": (normal(33, 17).T, normal(33, 29)),
        "columns": (normal(17, 66)[:, 33:], normal(29, 66)[:, :33].T),
        "every second row": (normal(34, 33)[::2], normal(33, 29)),
        "one row": (normal(1, 33), normal(33, 29)),
        "no row": (normal(0, 33), normal(33, 29)),
    }


@pytest.mark.parametrize("name", matrices())
def test_product(library: str, name: str, multiplied: list[tuple[int, ...]]) -> None:
    a, b = matrices()[name]
    made = product(a, b)
    assert made.dtype == torch.float32 and made.is_contiguous()
    torch.testing.assert_close(made.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert len(multiplied) == (library == "numpy" and len(a) > 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_stay_with_torch(
    library: str, dtype: torch.dtype, multiplied: list[tuple[int, ...]]
) -> None:
    a, b = (x.to(dtype) for x in matrices()["whole"])
    made = product(a, b)
    assert made.dtype == dtype and torch.equal(made, a @ b)
    assert not multiplied


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_added_product(
    library: str,
    narrow: bool,
    deep: bool,
    monkeypatch: pytest.MonkeyPatch,
    multiplied: list[tuple[int, ...]],
) -> None:
    monkeypatch.setattr(products, "_DEEP", 33 if deep else 34)
    a, b = matrices()["right transposed"]
    a, b = (a.bfloat16(), b.bfloat16()) if narrow else (a, b)
    total = torch.ones(17, 29)
    for _ in range(2):
        add_product(total, a, b)
    exact = 1 + 2 * (a.double() @ b.double())
    near = 2e-2 if narrow else 1e-5
    torch.testing.assert_close(total.double(), exact, rtol=near, atol=near * 10)
    assert len(multiplied) == (2 if library == "numpy" and deep and not narrow else 0)


def test_weights_can_still_be_freed(library: str) -> None:
    """FSDP frees a weight that it gathered by making its storage empty."""
    x, weight = torch.randn(6, 8), torch.randn(5, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    for tensor in (x, weight):
        tensor.untyped_storage().resize_(0)


def test_a_buffer_is_used_again_and_grows(library: str) -> None:
    a, b = matrices()["whole"]
    buffer = Buffer()
    small = product(a[:5], b, buffer)
    kept, place = small.clone(), small.data_ptr()
    smaller = product(a[5:8], b, buffer)
    assert smaller.data_ptr() == place and not torch.equal(small[:3], kept[:3])
    large = product(a, b, buffer)
    torch.testing.assert_close(large, a @ b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(smaller, (a @ b)[5:8], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trains_weight", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_linear_has_the_gradients_of_torch(
    library: str,
    bias: bool,
    trains_weight: bool,
    columns: bool,
    multiplied: list[tuple[int, ...]],
) -> None:
    g = torch.Generator().manual_seed(1)
    x, wide, offset = (torch.randn(s, generator=g) for s in [(19, 8), (12, 16), (12,)])
    outer = torch.randn(19, 12, generator=g)

    def run(dtype: torch.dtype, ours: bool) -> list[Tensor | None]:
        leaves = [one.to(dtype, copy=True) for one in (x, wide, offset)]
        leaves[0].requires_grad_()
        leaves[1].requires_grad_(trains_weight)
        leaves[2].requires_grad_(bias)
        weight = leaves[1][:, 8:] if columns else leaves[1][:, :8].contiguous()
        made = (linear if ours else F.linear)(leaves[0], weight, leaves[2] if bias else None)
        (made * outer.to(dtype)).sum().backward()
        return [made.detach(), *(leaf.grad for leaf in leaves)]

    for got, exact in zip(run(torch.float32, True), run(torch.float64, False), strict=True):
        assert (got is None) == (exact is None)
        if got is not None and exact is not None:
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert len(multiplied) == (2 + trains_weight if library == "numpy" else 0)


def test_autocast_and_batches_stay_with_torch(
    library: str, multiplied: list[tuple[int, ...]]
) -> None:
    x, weight = torch.randn(6, 8), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(x.view(2, 3, 8), weight).shape == (2, 3, 5)
    assert not multiplied


def test_a_second_derivative_is_refused_and_not_wrong(library: str) -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x, weight).square().sum(), x, create_graph=True)
    if library == "numpy":
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    else:
        grad.sum().backward()


def test_small_products_stay_with_torch(
    monkeypatch: pytest.MonkeyPatch, one_thread: None, multiplied: list[tuple[int, ...]]
) -> None:
    monkeypatch.setenv(products.VARIABLE, "numpy")
    product(torch.randn(2, 64), torch.randn(64, 64))
    assert not multiplied
    product(torch.randn(512, 64), torch.randn(64, 64))
    assert multiplied == [(512, 64, 64)]


def test_threads_of_torch_leave_all_to_torch(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setenv(products.VARIABLE, "numpy")
    torch.set_num_threads(2)
    assert products.library() == "torch"


@pytest.mark.parametrize("suits", [False, True])
def test_the_processor_decides_where_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, one_thread: None, suits: bool
) -> None:
    monkeypatch.delenv(products.VARIABLE, raising=False)
    monkeypatch.setattr(products, "_suits", lambda: suits)
    assert products.library() == ("numpy" if suits else "torch")
    monkeypatch.setenv(products.VARIABLE, "torch")
    assert products.library() == "torch"


def test_an_unknown_library_is_named(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv(products.VARIABLE, "cublas")
    with pytest.raises(HeadsmithError, match="HEADSMITH_PRODUCTS is torch or numpy, not cublas"):
        product(torch.randn(512, 64), torch.randn(64, 64))


def test_openblas_gets_no_threads_of_its_own(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    from threadpoolctl import threadpool_info, threadpool_limits

    products._one_thread.cache_clear()
    monkeypatch.setenv(products.VARIABLE, "numpy")
    with threadpool_limits(2, "blas"):
        product(torch.randn(512, 64), torch.randn(64, 64))
        counts = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    products._one_thread.cache_clear()
    assert set(counts) <= {1}


@pytest.mark.skipif(not packing_helps(torch.zeros(1, 1)), reason="torch has no oneDNN here")
def test_decoding_packs_it_like_any_linear_layer() -> None:
    module = nn.Sequential(Linear(4, 4), nn.Linear(4, 4))
    assert pack_linears(module) == 2
    assert all(isinstance(part, PackedLinear) for part in module)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 4)])
def test_the_gradient_by_a_weight_is_added_up(
    dtype: torch.dtype, shape: tuple[int, int], rows: slice, library: str
) -> None:
    g = torch.Generator().manual_seed(0)
    total = WeightGradient(torch.empty(shape, dtype=dtype), dtype)
    exact = torch.zeros(shape, dtype=torch.float64)
    for count in (7, 3):
        x, grad = torch.randn(count, shape[1], generator=g), torch.randn(count, 12, generator=g)
        x, grad = x.to(dtype), grad[:, : shape[0]][:, rows].to(dtype)
        total.add(grad, x, rows)
        exact[rows] += grad.double().T @ x.double()
    found = total.sum()
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near)


def test_a_weight_that_nothing_was_multiplied_with_has_a_gradient_of_zeros() -> None:
    total = WeightGradient(torch.ones(4, 3), torch.float32)
    assert torch.equal(total.sum(), torch.zeros(4, 3))
