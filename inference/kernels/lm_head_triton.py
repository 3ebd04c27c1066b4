"""The kernels of the output matrix: each program streams some rows of it past all states and keeps
its k best logits and its softmax statistics; a second launch puts the programs' finds together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headsmith.inference.kernels.aot import Specimen
from headsmith.inference.kernels.lm_head import Best
from headsmith.inference.kernels.tile_triton import dot


@triton.jit
def _tile_kernel(
    x,
    weight,
    found,
    columns,
    stats,
    count,
    vocab,
    tiles,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < count
    here = tl.arange(0, BLOCK_V)
    column = tile * BLOCK_V + here
    real = column < vocab
    ahead = tl.arange(0, BLOCK_H)
    x_at = x + row.to(tl.int64)[:, None] * WIDTH + ahead[None, :]
    w_at = weight + column.to(tl.int64)[None, :] * WIDTH + ahead[:, None]
    logits = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for k in range(0, WIDTH, BLOCK_H):
        inside = k + ahead < WIDTH
        states = tl.load(x_at + k, mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + k, mask=inside[:, None] & real[None, :], other=0.0)
        logits = dot(states, w, logits)
    logits = tl.where(real[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    at = row.to(tl.int64) * tiles + tile
    tl.store(stats + at * 2, top, mask=live)
    tl.store(stats + at * 2 + 1, tl.sum(tl.exp(logits - top[:, None]), 1), mask=live)
    for rank in range(K):
        best, where = tl.max(logits, 1, return_indices=True)
        tl.store(found + at * K + rank, best, mask=live)
        tl.store(columns + at * K + rank, tile * BLOCK_V + where, mask=live)
        logits = tl.where(here[None, :] == where[:, None], float("-inf"), logits)


@triton.jit
def _merge_kernel(
    found,
    columns,
    stats,
    ids,
    out_logits,
    out_ids,
    out_lse,
    tiles,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_T)
    at = stats + (row * tiles + tile) * 2
    top = tl.load(at, mask=tile < tiles, other=float("-inf"))
    sums = tl.load(at + 1, mask=tile < tiles, other=0.0)
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(sums * tl.exp(top - highest), 0))
    tl.store(out_lse + row, lse)
    candidate = tl.arange(0, BLOCK_C)
    known = candidate < tiles * K
    first = row * tiles * K
    logits = tl.load(found + first + candidate, mask=known, other=float("-inf"))
    for rank in range(K):
        best, where = tl.max(logits, 0, return_indices=True)
        column = tl.load(columns + first + where).to(tl.int64)
        if MAPPED:
            column = tl.load(ids + column)
        tl.store(out_logits + row * K + rank, best)
        tl.store(out_ids + row * K + rank, column)
        logits = tl.where(candidate == where, float("-inf"), logits)


def blocks(dtype: torch.dtype, rows: int) -> tuple[int, int, int, int, int]:
    """Rows, ids and width of a program's tile, its warps and the depth of its pipeline.

    More rows take more ids at once: the states are read again for each tile of ids.
    """
    if dtype == torch.float32:
        return 16, 64, 32, 4, 2
    block = min(max(triton.next_power_of_2(rows), 16), 64)
    return (block, 256, 64, 8, 3) if block == 64 else (block, 128, 64, 4, 4)


def launch(x: Tensor, weight: Tensor, k: int = 1, ids: Tensor | None = None) -> Best:
    """lm_head.reference in two launches."""
    n, width = x.shape
    vocab = len(weight)
    x = x.contiguous()
    assert weight.is_contiguous(), "the output matrix lies in one piece"
    block_r, block_v, block_h, warps, stages = blocks(x.dtype, n)
    tiles = triton.cdiv(vocab, block_v)
    found = torch.empty(n, tiles, k, dtype=torch.float32, device=x.device)
    columns = torch.empty(n, tiles, k, dtype=torch.int32, device=x.device)
    stats = torch.empty(n, tiles, 2, dtype=torch.float32, device=x.device)
    _tile_kernel[(tiles, triton.cdiv(n, block_r))](
        x,
        weight,
        found,
        columns,
        stats,
        n,
        vocab,
        tiles,
        WIDTH=width,
        K=k,
        BLOCK_R=block_r,
        BLOCK_V=block_v,
        BLOCK_H=block_h,
        num_warps=warps,
        num_stages=stages,
    )
    logits = torch.empty(n, k, dtype=torch.float32, device=x.device)
    chosen = torch.empty(n, k, dtype=torch.int64, device=x.device)
    lse = torch.empty(n, dtype=torch.float32, device=x.device)
    _merge_kernel[(n,)](
        found,
        columns,
        stats,
        columns if ids is None else ids,
        logits,
        chosen,
        lse,
        tiles,
        K=k,
        BLOCK_C=triton.next_power_of_2(tiles * k),
        BLOCK_T=triton.next_power_of_2(tiles),
        MAPPED=ids is not None,
        num_warps=8,
    )
    return Best(logits, chosen, lse)


def specimens() -> list[Specimen]:
    """Llama-3.1-8B: a draft vocabulary of 32,000 with the ten best of a row and of ten, and the
    target's 128,256 with the best of 61 rows.
    """
    found = []
    for name, dtype, rows, k in (
        ("draft", torch.bfloat16, 10, 10),
        ("target1", torch.bfloat16, 1, 1),
        ("target61", torch.bfloat16, 61, 1),
        ("float32", torch.float32, 10, 10),
    ):
        kind = "*fp32" if dtype == torch.float32 else "*bf16"
        block_r, block_v, block_h, warps, stages = blocks(dtype, rows)
        signature = {
            **dict.fromkeys(("x", "weight"), kind),
            **dict.fromkeys(("found", "stats"), "*fp32"),
            "columns": "*i32",
            **dict.fromkeys(("count", "vocab", "tiles"), "i32"),
        }
        sizes: dict[str, object] = {"WIDTH": 4096, "K": k, "BLOCK_R": block_r}
        tile = {"BLOCK_V": block_v, "BLOCK_H": block_h}
        found.append(
            Specimen(f"lm_head.{name}", _tile_kernel, signature, sizes | tile, warps, stages)
        )
    return [*found, _merge("draft", 250, 10, True), _merge("target", 501, 1, False)]


def _merge(name: str, tiles: int, k: int, mapped: bool) -> Specimen:
    signature = {
        **dict.fromkeys(("found", "stats", "out_logits", "out_lse"), "*fp32"),
        "columns": "*i32",
        "ids": "*i64" if mapped else "*i32",
        "out_ids": "*i64",
        "tiles": "i32",
    }
    constexprs: dict[str, object] = {
        "K": k,
        "BLOCK_C": triton.next_power_of_2(tiles * k),
        "BLOCK_T": triton.next_power_of_2(tiles),
        "MAPPED": mapped,
    }
    return Specimen(f"lm_head.merge_{name}", _merge_kernel, signature, constexprs, 8, 3)
