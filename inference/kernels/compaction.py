"""Moving the accepted nodes of draft trees onto consecutive rows of the cache, in all layers at
once, and its plain reference.

Shapes: B requests, L the longest path, g key/value heads, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headsmith.inference.kernels import runs, use_kernels


@dataclass(frozen=True, slots=True)
class Stores:
    """Keys and values of all layers, [slots, g, capacity, d] each and of one shape, and where they
    lie: int64 [stores] on their device.
    """

    tensors: tuple[Tensor, ...]
    pointers: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> list["Stores"]:
        """The tensors by shape and dtype: layers may differ."""
        kinds: dict[object, list[Tensor]] = {}
        for tensor in tensors:
            assert tensor.is_contiguous(), "a store is one piece of memory"
            kinds.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
        return [
            cls(tuple(same), torch.tensor([t.data_ptr() for t in same], device=same[0].device))
            for same in kinds.values()
        ]


def compact(stores: Stores, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    """Row start + path[i] of a slot becomes row start + i, for i below count, in place.

    slots, starts and counts int32 [B], paths int32 [B, L] of ascending nodes, so path[i] >= i. A
    slot stands in at most one request.
    """
    if use_kernels(stores.pointers.device):
        from headsmith.inference.kernels.compaction_triton import launch

        runs("compaction")
        launch(stores, slots, starts, paths, counts)
    else:
        reference(stores, slots, starts, paths, counts)


def reference(stores: Stores, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    """The same, one request and one store at a time."""
    requests = zip(slots.tolist(), starts.tolist(), paths, counts.tolist(), strict=True)
    for slot, start, path, count in requests:
        index = path[:count].long() + start
        for store in stores.tensors:
            # Indexing copies before it writes, so source and destination may overlap.
            store[slot, :, start : start + count] = store[slot, :, index]
