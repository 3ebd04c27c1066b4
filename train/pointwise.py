"""Norm, gate and rotation of the unroll, each in few passes over memory, forward and backward.

On a CPU whose matrix products are fast, half of a step is what autograd makes of these: a pass, and
fresh memory, for every sign in the formula. All compute in float32 at least.

Shapes: n rows, H width, I inner width of the MLP, h heads of size d.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headsmith.models.linear import at_least_float32


def rms_norm(x: Tensor, norm: nn.RMSNorm, dtype: torch.dtype) -> Tensor:
    """`norm` of x [n, H], as `dtype`."""
    if x.device.type != "cpu":
        return norm(x).to(dtype)
    out: Tensor = _RmsNorm.apply(x, norm.weight, norm.eps, dtype)
    return out


def swiglu(both: Tensor) -> Tensor:
    """Gate and up beside each other [n, 2 I] -> silu(gate) * up [n, I]."""
    out: Tensor = _Swiglu.apply(both)
    return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`headsmith.models.eagle3.rotate` of x [n, h, d] by tables [n, d], in x's dtype."""
    out: Tensor = _Rotated.apply(x, cos, sin)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = at_least_float32(x)
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad, normed = at_least_float32(grad), at_least_float32(x) * inverse
        by_weight = grad * normed
        # What a row's length takes back.
        along = (by_weight @ weight.to(grad.dtype)).div_(x.shape[-1])[:, None]
        by_x = (grad * weight).addcmul_(normed, along, value=-1).mul_(inverse)
        return by_x.to(x.dtype), by_weight.sum(0).to(weight.dtype), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        # Kept, since an exponential is slower than memory.
        active = F.silu(gate)
        ctx.save_for_backward(both, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        both, active = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        by_both = torch.empty_like(both)
        by_gate, by_up = by_both.chunk(2, -1)
        torch.mul(active, grad, out=by_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=by_gate)
        return by_both


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # Back by the same angle: the tables are alike in both halves.
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, cos, sin = at_least_float32(x), cos[:, None], sin[:, None]
    out = wide * cos
    half = x.shape[-1] // 2
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(wide[..., :half], sin[..., half:])
    return out.to(x.dtype)
