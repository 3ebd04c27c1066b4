"""How the kernels of unroll attention are launched, and their specimens."""

import math
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from headsmith.inference.kernels.aot import ARCHITECTURES, Specimen, architecture_of
from headsmith.train.kernels.unroll_attention import Layout
from headsmith.train.kernels.unroll_attention_triton import (
    forward_kernel,
    key_kernel,
    own_kernel,
    query_kernel,
)


def blocks(dtype: torch.dtype, part: str, architecture: int) -> tuple[int, int, int]:
    """Queries and keys of a tile, and warps. What keeps two sums a key or a row takes fewer
    queries, since its registers would not do; nor would those of the forward on Blackwell, whose
    products pass through them from its tensor memory.
    """
    if dtype == torch.float32:
        return 32, 32, 8
    keys = 32 if part == "forward" and architecture >= 100 else 64
    return (32 if part in ("key", "own") else 64), keys, 8


def _constexprs(query: Tensor, keys: Tensor, layout: Layout, part: str) -> dict[str, Any]:
    size = query.shape[-1]
    m, n, warps = blocks(query.dtype, part, architecture_of(query.device))
    return {
        "GROUP": len(query) // len(keys),
        "HEADS": len(keys),
        "SIZE": size,
        "WINDOW": layout.window is not None,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_D": max(triton.next_power_of_2(size), 16),
        "num_warps": warps,
        "num_stages": 1 if query.dtype == torch.float32 else 2,
    }


def _places(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and their documents' starts, int32 [n], and the ends of the documents, int64."""
    ends = torch.tensor(layout.lengths, device=layout.rows.device).cumsum(0)
    document = torch.searchsorted(ends, layout.rows, right=True)
    starts = torch.cat([ends.new_zeros(1), ends])[document]
    return layout.rows.int(), starts.int(), ends


def launch_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """unroll_attention.reference_forward in one launch."""
    heads, count, size = query.shape
    rows, starts, _ = _places(layout)
    out = torch.empty_like(query)
    lse = torch.empty(heads, count, dtype=torch.float32, device=query.device)
    settings = _constexprs(query, keys, layout, "forward")
    if count:
        forward_kernel[(triton.cdiv(count, settings["BLOCK_M"]), heads)](
            query,
            keys,
            values,
            own_keys,
            own_values,
            rows,
            starts,
            out,
            lse,
            count,
            keys.shape[1],
            len(own_keys),
            layout.window or 0,
            1 / math.sqrt(size),
            **settings,
        )
    return out, lse


def launch_backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """unroll_attention.reference_backward in three launches."""
    (heads, count, size), tokens, later = query.shape, keys.shape[1], len(own_keys)
    rows, starts, ends = _places(layout)
    by_query, by_key, by_value = (torch.zeros_like(x) for x in (query, keys, values))
    by_own_key, by_own_value = torch.zeros_like(own_keys), torch.zeros_like(own_values)
    found = (by_query, by_key, by_value, by_own_key, by_own_value)
    if not count:
        return found
    settings = _constexprs(query, keys, layout, "query")
    tile, step = settings["BLOCK_M"], settings["BLOCK_N"]
    numbers = (layout.window or 0, 1 / math.sqrt(size))
    query_kernel[(triton.cdiv(count, tile), heads)](
        query,
        keys,
        values,
        own_keys,
        own_values,
        rows,
        starts,
        lse,
        delta,
        grad,
        by_query,
        count,
        tokens,
        later,
        *numbers,
        **settings,
    )
    # A block of keys is seen by the queries from its first key to the end of its last document.
    corners = torch.arange(0, tokens, step, device=rows.device)
    behind = ends[torch.searchsorted(ends, (corners + step - 1).clamp(max=tokens - 1), right=True)]
    firsts, lasts = (torch.searchsorted(layout.rows, x).int() for x in (corners, behind))
    heads_apart = _constexprs(query, keys, layout, "key")
    del heads_apart["HEADS"]
    key_kernel[(len(corners), len(keys))](
        query,
        keys,
        values,
        rows,
        starts,
        firsts,
        lasts,
        lse,
        delta,
        grad,
        by_key,
        by_value,
        count,
        tokens,
        later,
        *numbers,
        **heads_apart,
    )
    if later:
        alone = _constexprs(query, keys, layout, "own")
        names = ("GROUP", "HEADS", "SIZE", "BLOCK_M", "BLOCK_D", "num_warps")
        own_kernel[(triton.cdiv(count, alone["BLOCK_M"]), len(keys), later)](
            query,
            own_keys,
            own_values,
            lse,
            delta,
            grad,
            by_own_key,
            by_own_value,
            count,
            numbers[1],
            **{name: alone[name] for name in names},
        )
    return found


def specimens() -> list[Specimen]:
    """Llama-3.1-8B's heads, with and without a window, and SmolLM2-135M's in float32."""
    found = []
    for name, dtype, group, size, window in (
        ("llama", torch.bfloat16, 4, 128, False),
        ("window", torch.bfloat16, 4, 128, True),
        ("float32", torch.float32, 3, 64, False),
    ):
        kind = "*fp32" if dtype == torch.float32 else "*bf16"
        stages = 1 if dtype == torch.float32 else 2
        types = {
            **dict.fromkeys(
                "query keys values own_keys own_values out grad by_query by_key by_value".split(),
                kind,
            ),
            **dict.fromkeys("rows starts firsts lasts".split(), "*i32"),
            **dict.fromkeys(("lse", "delta"), "*fp32"),
            **dict.fromkeys("count tokens later window".split(), "i32"),
            "scale": "fp32",
        }
        sizes = {"GROUP": group, "HEADS": 8, "SIZE": size, "WINDOW": window}
        for part, kernel in (
            ("forward", forward_kernel),
            ("query", query_kernel),
            ("key", key_kernel),
            ("own", own_kernel),
        ):
            apart = part == "forward" and dtype != torch.float32
            for architectures in ((80, 90), (100,)) if apart else (ARCHITECTURES,):
                m, n, warps = blocks(dtype, part, architectures[0])
                sizes |= {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": size}
                names = kernel.arg_names
                signature = {n: types[n] for n in names if n in types}
                constexprs: dict[str, object] = {n: sizes[n] for n in names if n in sizes}
                label = f"unroll_attention.{part}_{name}"
                one = Specimen(label, kernel, signature, constexprs, warps, stages)
                found.append(replace(one, architectures=architectures))
    return found
