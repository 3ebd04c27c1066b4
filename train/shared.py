"""What every step of an unroll reads: a matrix to multiply with, a table to gather from.

The narrow copy of a matrix is made once a packed row. The gradient is added up over the steps in
float32 at least, in one place, and handed on once: autograd would make one for each step and add
them up in the precision of the products.

Shapes: n rows, i numbers into a matrix, o out of it; a table of T rows, H wide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headsmith.models.linear import at_least_float32
from headsmith.models.products import WeightGradient, product


def product_dtype(like: Tensor) -> torch.dtype:
    """What products with a tensor are made in: autocast's dtype, or its own."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


class Shared:
    """The matrix [o, i] that is `weights` below each other."""

    def __init__(self, *weights: Tensor) -> None:
        self._sum = _Sum()
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._weight = _Lend.apply(whole, self._sum, product_dtype(whole))

    def __call__(self, x: Tensor, rows: slice = slice(None)) -> Tensor:
        """x [n, i] -> [n, o], in the precision of products; with some rows of the matrix only."""
        out: Tensor = _Multiply.apply(x.to(self._weight.dtype), self._weight, self._sum, rows)
        return out


class SharedTable:
    """A table [T, H], of which every step takes rows, each at most once."""

    def __init__(self, table: Tensor) -> None:
        self._sum = _Sum()
        self._table = _Lend.apply(table, self._sum, table.dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """Its rows int64 [n] -> [n, H]."""
        out: Tensor = _Gather.apply(self._table, rows, self._sum)
        return out


class _Sum:
    """The gradient so far, None before the first."""

    def __init__(self) -> None:
        self.total: WeightGradient | Tensor | None = None


class _Lend(torch.autograd.Function):
    """What the steps read. They put its gradient into the sum and give autograd none."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, gradient: _Sum, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.dtype = gradient, shared.dtype
        return shared.detach().to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None, None]:
        total, ctx.gradient.total = ctx.gradient.total, None
        whole = total.sum() if isinstance(total, WeightGradient) else total
        return None if whole is None else whole.to(ctx.dtype), None, None


class _Multiply(torch.autograd.Function):
    """x [n, i] @ weight[rows].T, of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: _Sum, rows: slice) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient, ctx.rows = gradient, rows
        return product(x, weight[rows].T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            if ctx.gradient.total is None:
                ctx.gradient.total = WeightGradient(weight, grad.dtype)
            ctx.gradient.total.add(grad, x, ctx.rows)
        by_x = product(grad, weight[ctx.rows]) if ctx.needs_input_grad[0] else None
        return by_x, None, None, None


class _Gather(torch.autograd.Function):
    """table [T, H] at rows [n]."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, gradient: _Sum) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.gradient, ctx.shape = gradient, table.shape
        return table.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (rows,) = ctx.saved_tensors
        wide = at_least_float32(grad)
        if ctx.gradient.total is None:
            ctx.gradient.total = wide.new_zeros(ctx.shape)
        ctx.gradient.total.index_add_(0, rows, wide)
        return None, None, None
