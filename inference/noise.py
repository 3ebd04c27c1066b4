"""Random numbers that depend on where a token stands and on nothing else, so that a text can be
repeated from its seed in any batch, at any depth of any tree (spec/verifier.md 7, entry 35).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token is chosen: whose text it is, and its position in it (the prompt counts).

    The text before it is `prompt`, then `written`, then the drafts `path`. Penalties read it; it is
    no part of what noise is keyed by.
    """

    request: str
    position: int
    prompt: Sequence[int] = field(default=(), compare=False, repr=False)
    written: Sequence[int] = field(default=(), compare=False, repr=False)
    path: Sequence[int] = field(default=(), compare=False, repr=False)


def gumbel(seed: int, place: Place, size: int, use: str = "") -> Tensor:
    """Standard Gumbel noise, float32 [size] on the CPU, the same for the same arguments. What is
    drawn for another `use` is independent of it. Not to be changed: it may be handed out again.
    """
    return _waits(_key(seed, place, use) >> 1, size)


# A round draws for the places that it drafts, and the next for most of them again.
@lru_cache(maxsize=128)
def _waits(key: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(key)
    waits = torch.empty(size).exponential_(generator=generator)
    return -waits.clamp(min=torch.finfo(torch.float32).tiny).log()


def coin(seed: int, place: Place, use: str) -> float:
    """A uniform number in [0, 1): 53 bits, so that it never rounds to 1."""
    return float((_key(seed, place, use) >> 11) / 2**53)


def _key(seed: int, place: Place, use: str) -> int:
    name = f"{use}{seed}/{place.position}/{place.request}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
