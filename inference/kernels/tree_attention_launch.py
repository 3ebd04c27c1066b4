"""Launching tree attention, and the specimens of its kernels."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from headsmith.inference.kernels.aot import ARCHITECTURES, Specimen, architecture_of
from headsmith.inference.kernels.plan import Plan, parts_of
from headsmith.inference.kernels.tree_attention_triton import part_kernel, sum_kernel

# Columns of a tile, whatever the rows: the order of a row's sum does not depend on them.
COLUMNS = 16


def blocks(dtype: torch.dtype, rows: int, d: int, architecture: int) -> tuple[int, int, int]:
    """Rows a program takes of `rows`, its warps and the depth of its pipeline.

    A larger block reads the keys fewer times, as far as its sums fit the registers: float32
    products live in nothing else, and Blackwell's pass through them from its tensor memory.
    """
    if dtype == torch.float32:
        most = 16
    elif d > 128:
        most = 64
    else:
        most = 128 if architecture >= 100 and d > 64 else 256
    block = min(max(triton.next_power_of_2(rows), 16), most)
    return block, 8 if block >= 128 else 4, 2 if dtype == torch.float32 else 3


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """tree_attention.reference in two launches; float32, bfloat16 or float16."""
    heads, tokens, d = query.shape
    _, groups, _, dv = values.shape
    query = query if query.stride(2) == 1 else query.contiguous()
    assert keys.stride()[2:] == (d, 1) and values.stride()[2:] == (dv, 1), "rows of a cache"
    group = heads // groups
    block, warps, stages = blocks(
        query.dtype, plan.longest * group, d, architecture_of(query.device)
    )
    row_blocks = triton.cdiv(plan.longest * group, block)
    longest = plan.prefix if window is None else min(plan.prefix, max(window - 1, 0))
    parts, count = parts_of(longest), len(plan.requests)
    sums = torch.empty(parts, heads, tokens, dv, dtype=torch.float32, device=query.device)
    stats = torch.empty(parts, heads, tokens, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(tokens, heads, dv, dtype=query.dtype, device=query.device)
    part_kernel[(count * row_blocks, groups, parts)](
        query,
        keys,
        values,
        sums,
        stats,
        plan.requests,
        plan.words,
        plan.depths,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        tokens,
        float(d**-0.5 if scale is None else scale),
        float(softcap or 0.0),
        window or 0,
        GROUP=group,
        HEADS=heads,
        D=d,
        DV=dv,
        BLOCK_D=max(triton.next_power_of_2(d), 16),
        BLOCK_DV=max(triton.next_power_of_2(dv), 16),
        BLOCK_M=block,
        BLOCK_N=COLUMNS,
        ROW_BLOCKS=row_blocks,
        WORDS=plan.words.shape[1],
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=warps,
        num_stages=stages,
    )
    sum_kernel[(tokens, heads)](
        sums,
        stats,
        out,
        stats if sinks is None else sinks,
        plan.requests,
        plan.owner,
        tokens,
        window or 0,
        HEADS=heads,
        DV=dv,
        BLOCK_DV=triton.next_power_of_2(dv),
        MOST=parts,
        WINDOWED=window is not None,
        SINKS=sinks is not None,
        num_warps=4,
    )
    return out.transpose(0, 1)


def specimens() -> list[Specimen]:
    """A tree of 61 nodes and a chain of 8 for Llama-3.1-8B, whose head size is 128 and whose
    groups are of 4; head size 64 with groups of 3 (SmolLM2) in a window with a soft cap; float32.
    """
    cases = [
        ("tree", torch.bfloat16, 61, 4, 128, False, (80, 90)),
        ("tree", torch.bfloat16, 61, 4, 128, False, (100,)),
        ("chain", torch.bfloat16, 8, 4, 128, False, ARCHITECTURES),
        ("window", torch.bfloat16, 61, 3, 64, True, ARCHITECTURES),
        ("group8", torch.bfloat16, 61, 8, 128, False, (80, 90)),
        ("group8", torch.bfloat16, 61, 8, 128, False, (100,)),
        ("head256", torch.bfloat16, 8, 2, 256, True, ARCHITECTURES),
        ("float32", torch.float32, 61, 3, 64, False, ARCHITECTURES),
    ]
    found = []
    for name, dtype, nodes, group, d, limited, architectures in cases:
        block, warps, stages = blocks(dtype, nodes * group, d, architectures[0])
        row_blocks = triton.cdiv(nodes * group, block)
        part = _part(name, dtype, group, d, block, row_blocks, limited, warps, stages)
        found.append(replace(part, architectures=architectures))
    return [*found, _sum(1, False), _sum(32, True)]


def _part(
    name: str,
    dtype: torch.dtype,
    group: int,
    d: int,
    block: int,
    row_blocks: int,
    limited: bool,
    warps: int,
    stages: int,
) -> Specimen:
    kind = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype]
    strides = ("query_head", "query_row", "key_slot", "key_head", "value_slot", "value_head")
    signature = {
        **dict.fromkeys(("query", "keys", "values"), kind),
        **dict.fromkeys(("sums", "stats"), "*fp32"),
        **dict.fromkeys(("requests", "depths"), "*i32"),
        "words": "*i64",
        **dict.fromkeys(strides, "i32:16"),
        **dict.fromkeys(("tokens", "window"), "i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }
    constexprs: dict[str, object] = {
        "GROUP": group,
        "HEADS": 8 * group,
        "D": d,
        "DV": d,
        "BLOCK_D": triton.next_power_of_2(d),
        "BLOCK_DV": triton.next_power_of_2(d),
        "BLOCK_M": block,
        "BLOCK_N": COLUMNS,
        "ROW_BLOCKS": row_blocks,
        "WORDS": 1,
        "WINDOWED": limited,
        "CAPPED": limited,
    }
    return Specimen(
        f"tree_attention.{name}.{block}", part_kernel, signature, constexprs, warps, stages
    )


def _sum(parts: int, sinks: bool) -> Specimen:
    signature = {
        **dict.fromkeys(("sums", "stats"), "*fp32"),
        **dict.fromkeys(("out", "sinks"), "*bf16"),
        **dict.fromkeys(("requests", "owner"), "*i32"),
        **dict.fromkeys(("tokens", "window"), "i32"),
    }
    constexprs: dict[str, object] = {
        "HEADS": 32,
        "DV": 128,
        "BLOCK_DV": 128,
        "MOST": parts,
        "WINDOWED": sinks,
        "SINKS": sinks,
    }
    return Specimen(f"tree_attention.sum{parts}", sum_kernel, signature, constexprs, 4, 3)
