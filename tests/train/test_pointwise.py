"""Norm, gate and rotation against the plain formulas, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headsmith.models.eagle3 import rotate
from headsmith.train.pointwise import rms_norm, rotated, swiglu

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
NEAR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def check(
    found: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parameters: list[Tensor],
) -> None:
    """Values and gradients of `found` are those of `plain` in float64."""
    g = torch.Generator().manual_seed(0)
    given = torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    ours, exact = given.clone().requires_grad_(), given.double().requires_grad_()
    out, expected = found(ours), plain(exact)
    seed = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)
    made = torch.autograd.grad(out, [ours, *parameters], seed)
    right = torch.autograd.grad(expected, [exact, *parameters], seed.double())
    assert made[0].dtype == dtype
    for a, b in zip((out, *made), (expected, *right), strict=True):
        assert (a.double() - b).norm() <= NEAR[dtype] * b.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype) -> None:
    norm = nn.RMSNorm(24, 1e-5, dtype=torch.promote_types(dtype, torch.float32))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)

    def plain(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight

    check(lambda x: rms_norm(x, norm, dtype), plain, (7, 24), dtype, [norm.weight])


def test_norm_of_wide_states_for_narrow_products() -> None:
    norm = nn.RMSNorm(24, 1e-5)
    x = torch.randn(7, 24, requires_grad=True)
    out = rms_norm(x, norm, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype: torch.dtype) -> None:
    def plain(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    check(swiglu, plain, (7, 40), dtype, [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype: torch.dtype) -> None:
    angles = torch.outer(torch.arange(7.0), torch.rand(8)).repeat(1, 2)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)

    def plain(x: Tensor) -> Tensor:
        return rotate(x.transpose(0, 1), cos.double(), sin.double()).transpose(0, 1)

    check(lambda x: rotated(x, cos, sin), plain, (7, 3, 16), dtype, [])
