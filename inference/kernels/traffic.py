"""How many bytes a kernel loads and stores, counted as the interpreter runs it.

Every load and store of Triton's interpreter passes here, and its unmasked elements are counted for
the tensor that they lie in. What a kernel keeps between its launches is in no tensor of the
caller's: that is its scratch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

SCRATCH = "scratch"


@dataclass(slots=True)
class Traffic:
    """The loads and stores of a run: the first address and the bytes of each."""

    events: list[tuple[int, int]] = field(default_factory=list)

    def add(self, pointers: Any, mask: Any) -> None:
        """One load or store of the interpreter."""
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        chosen = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]
        if chosen.size:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            self.events.append((int(chosen.flat[0]), chosen.size * size))

    def by_tensor(self, tensors: dict[str, Tensor]) -> dict[str, int]:
        """Bytes moved of each tensor, and of the kernel's own scratch."""
        moved = dict.fromkeys([*tensors, SCRATCH], 0)
        for address, count in self.events:
            moved[_holder(address, tensors)] += count
        return moved


def _holder(address: int, tensors: dict[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if 0 <= address - storage.data_ptr() < storage.nbytes():
            return name
    return SCRATCH


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what kernels load and store within this block; needs TRITON_INTERPRET=1."""
    from triton.runtime.interpreter import interpreter_builder as builder

    traffic, load, store = Traffic(), builder.create_masked_load, builder.create_masked_store

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.add(pointers, mask)
        return load(pointers, mask, *rest)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.add(pointers, mask)
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield traffic
    finally:
        del builder.create_masked_load, builder.create_masked_store
