"""What the kernels share: the product of two tiles, rounding, and the soft cap of scores."""

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The interpreter keeps bfloat16 as bits and would multiply those; float32 products of bfloat16
# numbers are exact, so this is what a tensor core computes.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, added up in float32; float32 operands are not rounded to TF32."""
    if INTERPRETED:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        out = tl.dot(a, b, acc, input_precision="ieee")
    return out


@triton.jit
def narrow(x, dtype):
    """float32 x in another float type, rounded to the nearest, ties to even."""
    if INTERPRETED:
        # The interpreter cuts bfloat16 off, so what lies behind is rounded away first.
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32. Near 0 the exponential cancels, so a series stands there."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
