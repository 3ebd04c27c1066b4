"""Fused kernels of the decoder, each beside its plain PyTorch reference of the same signature.

A module `NAME.py` holds the public function and its reference and needs no Triton; `NAME_triton.py`
holds the kernel, its launcher and `specimens()`, and is imported only where `use_kernels` says so.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError

# off, until they have been measured on a GPU: the references. auto: the kernels on a GPU where
# Triton is installed. on: on the CPU too, in Triton's interpreter, which is for tests
# (TRITON_INTERPRET=1 must be set before Triton is imported).
VARIABLE = "HEADSMITH_KERNELS"


def use_kernels(device: torch.device) -> bool:
    """Whether tensors of this device go through the Triton kernels or through the references."""
    wish = os.environ.get(VARIABLE, "off")
    if wish not in ("auto", "on", "off"):
        raise HeadsmithError(f"{VARIABLE}={wish} is not one of auto, on, off")
    if wish == "on" and not _installed():
        raise HeadsmithError(
            f"{VARIABLE}=on needs Triton: pip install 'headsmith[kernels]', or unset {VARIABLE}"
        )
    if wish == "off" or (wish == "auto" and device.type != "cuda"):
        return False
    return _installed()


def takes(x: Tensor) -> bool:
    """Whether the kernels run on this tensor: none of them knows float64."""
    return x.dtype != torch.float64 and use_kernels(x.device)


# What is told of each kernel that runs, the innermost block last.
_watching: list[set[str]] = []


@contextmanager
def watching() -> Iterator[set[str]]:
    """The names of the kernels that run within this block."""
    _watching.append(set())
    try:
        yield _watching[-1]
    finally:
        seen = _watching.pop()
        for outer in _watching:
            outer |= seen


def runs(name: str) -> None:
    """Say that a kernel runs, so that no report needs to guess."""
    if _watching:
        _watching[-1].add(name)


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
