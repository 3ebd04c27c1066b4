"""Packed linear layers give what nn.Linear gives, and only what can be packed is packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headsmith.models.linear import PackedLinear, pack_linears, packing_helps

needs_packing = pytest.mark.skipif(
    not packing_helps(torch.zeros(1, 1)), reason="this build of torch has no oneDNN"
)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 5, 24, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(33, 47, bias=bias)
    x = torch.randn(rows, 33)
    with torch.inference_mode():
        got = PackedLinear(linear)(x)
    assert got.shape == (rows, 47) and got.dtype == torch.float32
    torch.testing.assert_close(got, linear(x).detach(), rtol=1e-5, atol=1e-5)


@needs_packing
def test_leading_dimensions_are_kept() -> None:
    linear, x = nn.Linear(6, 4), torch.randn(2, 3, 6)
    with torch.inference_mode():
        got = PackedLinear(linear)(x)
    torch.testing.assert_close(got, linear(x).detach(), rtol=1e-5, atol=1e-6)


@needs_packing
def test_only_plain_float32_layers_are_replaced() -> None:
    class Own(nn.Linear):
        """A layer of a subclass may compute something else."""

    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Own(4, 4))
    module = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "b": inner, "c": nn.Linear(4, 4).double(), "d": nn.LayerNorm(4)}
    )
    assert pack_linears(module) == 2
    assert isinstance(module["a"], PackedLinear) and isinstance(inner[0], PackedLinear)
    assert type(inner[2]) is Own and type(module["c"]) is nn.Linear
    assert pack_linears(module) == 0
