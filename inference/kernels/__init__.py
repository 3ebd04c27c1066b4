"""Fused kernels of the decoder, each beside its plain PyTorch reference of the same signature.

A module `NAME.py` holds the public function and its reference and needs no Triton; `NAME_triton.py`
holds the kernel, its launcher and `specimens()`, and is imported only where `use_kernels` says so.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch

from headsmith.errors import HeadsmithError

# auto: on a GPU where Triton is installed. on: on the CPU too, in Triton's interpreter, which is
# for tests (TRITON_INTERPRET=1 must be set before Triton is imported). off: the references.
VARIABLE = "HEADSMITH_KERNELS"


def use_kernels(device: torch.device) -> bool:
    """Whether tensors of this device go through the Triton kernels or through the references."""
    wish = os.environ.get(VARIABLE, "auto")
    if wish not in ("auto", "on", "off"):
        raise HeadsmithError(f"{VARIABLE}={wish} is not one of auto, on, off")
    if wish == "on" and not _installed():
        raise HeadsmithError(
            f"{VARIABLE}=on needs Triton: pip install 'headsmith[kernels]', or unset {VARIABLE}"
        )
    if wish == "off" or (wish == "auto" and device.type != "cuda"):
        return False
    return _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
