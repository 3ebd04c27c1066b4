"""The kernels of the head's input: gather, norm and `fc` in one, and two norms and their
concatenation in one.

An RMS norm is one factor a row, and that factor can follow the product: (x / s) W = (x W) / s. So
the weights of `fc` stream past the raw rows once, while the squares add up beside.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headsmith.inference.kernels.aot import Specimen
from headsmith.inference.kernels.tile_triton import dot, narrow

NONE, EACH, WHOLE = 0, 1, 2


@triton.jit
def _fuse_kernel(
    taps,
    rows,
    norm,
    weight,
    out,
    count,
    eps,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < count
    source = tl.load(rows + row, mask=live, other=0).to(tl.int64) * (TAPS * WIDTH)
    ahead = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    squares = tl.zeros([BLOCK_R], tl.float32)
    for tap in range(TAPS):
        part = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
        for k in range(0, WIDTH, BLOCK_K):
            inside = k + ahead < WIDTH
            at = tap * WIDTH + k + ahead
            x_at = taps + source[:, None] + at[None, :]
            x = tl.load(x_at, mask=live[:, None] & inside[None, :], other=0.0)
            w = tl.load(
                weight + column.to(tl.int64)[None, :] * (TAPS * WIDTH) + at[:, None],
                mask=inside[:, None] & (column < OUT)[None, :],
                other=0.0,
            )
            if NORM != 0:
                x = x.to(tl.float32)
                squares += tl.sum(x * x, 1)
                scale = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
                x = narrow(x * scale[None, :], w.dtype)
            part = dot(x, w, part)
        if NORM == 1:
            part *= tl.rsqrt(squares / WIDTH + eps)[:, None]
            squares = tl.zeros([BLOCK_R], tl.float32)
        total += part
    if NORM == 2:
        total *= tl.rsqrt(squares / (TAPS * WIDTH) + eps)[:, None]
    out_at = out + row.to(tl.int64)[:, None] * OUT + column[None, :]
    real = live[:, None] & (column < OUT)[None, :]
    tl.store(out_at, narrow(total, out.dtype.element_ty), mask=real)


@triton.jit
def _norm_row(source, norm, to, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * scale
    tl.store(to + column, narrow(x, to.dtype.element_ty), mask=inside)


@triton.jit
def _input_kernel(
    embeds, z, embed_norm, hidden_norm, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    to = out + row * (2 * WIDTH)
    if tl.program_id(1) == 0:
        _norm_row(embeds + row * WIDTH, embed_norm, to, eps, WIDTH, BLOCK)
    else:
        _norm_row(z + row * WIDTH, hidden_norm, to + WIDTH, eps, WIDTH, BLOCK)


def launch_fuse(
    taps: Tensor,
    rows: Tensor,
    weight: Tensor,
    norms: Tensor | None = None,
    whole_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """head_input.reference_fuse in one launch."""
    _, m, width = taps.shape
    norm, kind = (norms, EACH) if norms is not None else (whole_norm, WHOLE)
    taps, weight = taps.contiguous(), weight.contiguous()
    out = torch.empty(len(rows), len(weight), dtype=taps.dtype, device=taps.device)
    block = min(max(triton.next_power_of_2(len(rows)), 16), 64)
    _fuse_kernel[(triton.cdiv(len(weight), 32), triton.cdiv(len(rows), block))](
        taps,
        rows,
        weight if norm is None else norm,
        weight,
        out,
        len(rows),
        eps,
        TAPS=m,
        WIDTH=width,
        OUT=len(weight),
        NORM=NONE if norm is None else kind,
        BLOCK_R=block,
        BLOCK_O=32,
        BLOCK_K=128 if taps.element_size() == 2 else 32,
        num_warps=4,
        num_stages=4 if taps.element_size() == 2 else 2,
    )
    return out


def launch_input(
    embeds: Tensor, z: Tensor, embed_norm: Tensor, hidden_norm: Tensor, eps: float = 1e-6
) -> Tensor:
    """head_input.reference_input in one launch."""
    n, width = z.shape
    embeds, z = embeds.contiguous(), z.contiguous()
    out = torch.empty(n, 2 * width, dtype=z.dtype, device=z.device)
    _input_kernel[(n, 2)](
        embeds,
        z,
        embed_norm,
        hidden_norm,
        out,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return out


def specimens() -> list[Specimen]:
    """An EAGLE-3 and an EAGLE-3.1 head of Llama-3.1-8B: three taps of 4,096."""
    signature = {
        **dict.fromkeys(("taps", "norm", "weight", "out"), "*bf16"),
        "rows": "*i64",
        "count": "i32",
        "eps": "fp32",
    }
    sizes: dict[str, object] = {"TAPS": 3, "WIDTH": 4096, "OUT": 4096, "BLOCK_O": 32}
    blocks = {"BLOCK_R": 16, "BLOCK_K": 128}
    found = [
        Specimen(f"head_input.{name}", _fuse_kernel, signature, sizes | blocks | {"NORM": n}, 4, 4)
        for name, n in (("fc", NONE), ("norm_fc", EACH), ("whole_norm_fc", WHOLE))
    ]
    wide = sizes | {"BLOCK_R": 64, "BLOCK_K": 128, "NORM": EACH}
    found.append(Specimen("head_input.norm_fc64", _fuse_kernel, signature, wide, 4, 4))
    pointers = ("embeds", "z", "embed_norm", "hidden_norm", "out")
    rows = {**dict.fromkeys(pointers, "*bf16"), "eps": "fp32"}
    widths: dict[str, object] = {"WIDTH": 4096, "BLOCK": 4096}
    return [*found, Specimen("head_input.concat", _input_kernel, rows, widths, 8, 3)]
