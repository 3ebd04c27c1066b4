"""How fast the machine is at most: bytes a second from memory, operations a second of a product.

Both are measured, in this process and with its threads. For known cards the maker's figures stand
beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# Bytes a second of memory and dense 16-bit operations a second, from the makers' data sheets.
CARDS = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100 80GB HBM3": (3.35e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "A100-SXM4-80GB": (2.04e12, 312e12),
    "A100-SXM4-40GB": (1.56e12, 312e12),
    "L40S": (0.864e12, 362e12),
}
# Larger than any cache that is near.
BYTES = {"cpu": 2**28, "cuda": 2**31}
SIDE = {"cpu": 1536, "cuda": 8192}


def measure_machine(
    device: torch.device, dtype: torch.dtype, *, size: int | None = None, side: int | None = None
) -> dict[str, Any]:
    """`bytes_per_s`, the better of a `copy` and a `read`; `flops_per_s` of a square product in
    `dtype`; `card`, what the maker says of both, or None.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    count = (size or BYTES[kind]) // 4
    copy, read = copy_and_read(count, device)
    n = side or SIDE[kind]
    matrix = torch.ones(n, n, dtype=dtype, device=device)
    flops = 2 * n**3 / best_of(lambda: matrix @ matrix, device)
    return {
        "bytes_per_s": max(copy, read),
        "copy_bytes_per_s": copy,
        "read_bytes_per_s": read,
        "flops_per_s": flops,
        "card": card_of(device),
    }


def copy_and_read(count: int, device: torch.device) -> tuple[float, float]:
    """Bytes a second of a copy of `count` float32 numbers, and of a product that reads two such."""
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    copy = best_of(lambda: target.copy_(source), device)
    read = best_of(lambda: torch.dot(source, target), device)
    return 8 * count / copy, 8 * count / read


def card_of(device: torch.device) -> dict[str, Any] | None:
    """The maker's figures for this card, if it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = next((card for card in CARDS if card in name), None)
    if known is None:
        return None
    memory, flops = CARDS[known]
    return {"name": known, "bytes_per_s": memory, "flops_per_s": flops}


def best_of(run: Callable[[], object], device: torch.device, tries: int = 5) -> float:
    """Seconds of the quickest of some tries, after one that is not counted."""
    seconds = []
    for _ in range(tries + 1):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
