"""Matrix products of training on a CPU, by the faster of two libraries that are there anyway.

torch multiplies with MKL. On an AMD processor whose caches and memory other jobs use too it falls
further behind than numpy's OpenBLAS, most of all where a matrix is wide or rows are few; on an idle
one the two are equal (docs/training-speed.md). numpy's is taken for float32 on an AMD processor
where torch has one thread, since threads of its own would fight with torch's over the cores.
HEADSMITH_PRODUCTS says otherwise: `torch` never takes it, `numpy` takes it on any processor.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headsmith.errors import HeadsmithError

VARIABLE = "HEADSMITH_PRODUCTS"
# Multiplications below which the way to numpy costs more than it saves.
_LEAST = 1 << 21
# numpy cannot add to what is there. A pass of its own costs little where every number of it is a
# sum of this many.
_DEEP = 1 << 11


class Buffer:
    """Memory for products that follow each other: fresh pages for every one of them would cost as
    much as a pass over it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def matrix(self, like: Tensor, rows: int, columns: int) -> Tensor:
        """Uninitialised [rows, columns] of like's kind; what was given before is lost."""
        kept = self._memory
        if kept is None or len(kept) < rows * columns or kept.dtype != like.dtype:
            kept = self._memory = like.new_empty(rows * columns)
        return kept[: rows * columns].view(rows, columns)


def product(a: Tensor, b: Tensor, buffer: Buffer | None = None) -> Tensor:
    """a [m, n] @ b [n, k], without gradient; in the memory of `buffer`, if there is one."""
    if buffer is None:
        out = a.new_empty(len(a), b.shape[1])
    else:
        out = buffer.matrix(a, len(a), b.shape[1])
    if not _numpy_is_faster(a, b):
        return torch.mm(a, b, out=out)
    numpy.matmul(_array(a), _array(b), out=_array(out))
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor, buffer: Buffer | None = None) -> None:
    """total += a [m, n] @ b [n, k], added up in the total's precision, without gradient; what has
    to be made apart is made in the memory of `buffer`.
    """
    separate = a.shape[1] >= _DEEP and _numpy_is_faster(a, b)
    if total.dtype == a.dtype and not separate:
        total.addmm_(a, b)
    else:
        total.add_(product(a, b, buffer))


class WeightGradient:
    """The gradient by a weight [o, i], added up over all products that it takes part in, in float32
    at least.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """For products made in `dtype`."""
        out, into = weight.shape
        # A narrow product that runs down the rows of both its matrices turns the first one around,
        # which a CPU does at the speed of memory: better the smaller of the two.
        self._turned = weight.device.type == "cpu" and dtype.itemsize < 4 and out >= into
        wide = torch.promote_types(weight.dtype, torch.float32)
        # Empty: memory that is filled with zeros to be added to is gone through twice more.
        self._total, self._shape = weight.new_empty(0, dtype=wide), (out, into)
        self._buffer = Buffer()

    def add(self, grad: Tensor, x: Tensor, rows: slice = slice(None)) -> None:
        """Of the product of x [n, i] with `rows` of the weight, which has this gradient [n, o]."""
        left, right = (x.T.contiguous(), grad) if self._turned else (grad.T, x)
        if self._total.dim() == 1 and grad.shape[1] == self._shape[0]:
            self._total = product(left, right).to(self._total.dtype)
        else:
            self._begin()
            part = self._total[:, rows] if self._turned else self._total[rows]
            add_product(part, left, right, self._buffer)

    def sum(self) -> Tensor:
        """[o, i], of the sum's own memory."""
        self._begin()
        return self._total.T if self._turned else self._total

    def _begin(self) -> None:
        if self._total.dim() == 1:
            shape = self._shape[::-1] if self._turned else self._shape
            self._total = self._total.new_zeros(shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, i] @ weight [o, i].T + bias [o], with gradients."""
    narrowed = torch.is_autocast_enabled(x.device.type)
    if narrowed or x.dim() != 2 or not _numpy_is_faster(x, weight.T):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight)
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """torch's, by `linear`: for layers that are trained."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    """x [n, i] @ weight [o, i].T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_x, by_weight = ctx.needs_input_grad
        return (
            product(grad, weight) if by_x else None,
            product(grad.T, x) if by_weight else None,
        )


class _Lent:
    """A float32 tensor's memory as numpy reads it. Not `Tensor.numpy`, which forbids the storage to
    be resized ever after, as FSDP does with the weights that it gathers.
    """

    def __init__(self, x: Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": numpy.dtype(numpy.float32).str,
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "strides": tuple(step * x.element_size() for step in x.stride()),
        }


def _array(x: Tensor) -> Any:
    """x for the length of a call: the array does not keep its memory alive."""
    return numpy.asarray(_Lent(x))


def _numpy_is_faster(a: Tensor, b: Tensor) -> bool:
    return (
        a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and a.numel() * b.shape[1] >= _LEAST
        and library() == "numpy"
    )


def library() -> str:
    """`torch` or `numpy`: who multiplies here and now."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "torch", "numpy"):
        raise HeadsmithError(f"{VARIABLE} is torch or numpy, not {asked}")
    if asked != "torch" and torch.get_num_threads() == 1 and (asked or _suits()):
        _one_thread()
        return "numpy"
    return "torch"


@cache
def _suits() -> bool:
    """Whether torch has MKL, numpy OpenBLAS, and the processor is AMD's."""
    blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    facts = Path("/proc/cpuinfo")
    amd = facts.exists() and "AuthenticAMD" in facts.read_text(errors="replace")
    return amd and "openblas" in blas and torch.backends.mkl.is_available()


@cache
def _one_thread() -> None:
    """OpenBLAS, for the rest of the process, without threads of its own."""
    threadpool_limits(1, "blas")
