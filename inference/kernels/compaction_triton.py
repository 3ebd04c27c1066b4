"""The kernel of cache compaction: one launch over every layer, key/value head and request."""

import triton
import triton.language as tl
from torch import Tensor

from headsmith.inference.kernels.aot import Specimen
from headsmith.inference.kernels.compaction import Stores


@triton.jit
def _compact_kernel(
    pointers,
    slots,
    starts,
    paths,
    counts,
    slot_stride,
    head_stride,
    LONGEST: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BYTES: tl.constexpr,
):
    # Rows are moved as whole words, whatever numbers they hold.
    address = tl.load(pointers + tl.program_id(0))
    if BYTES == 8:
        store = address.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        store = address.to(tl.pointer_type(tl.int32))
    else:
        store = address.to(tl.pointer_type(tl.int16))
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    slot = tl.load(slots + request).to(tl.int64)
    start = tl.load(starts + request)
    order = tl.arange(0, BLOCK_L)
    listed = order < tl.load(counts + request)
    node = tl.load(paths + request * LONGEST + order, mask=listed, other=0)
    word = tl.arange(0, BLOCK_W)
    # The first nodes of a path mostly lie where they belong.
    moved = (listed & (node != order))[:, None] & (word < WORDS)[None, :]
    base = store + slot * slot_stride + head * head_stride + word[None, :]
    rows = tl.load(base + (start + node).to(tl.int64)[:, None] * WORDS, mask=moved)
    # A row may be the source of one thread and the destination of another.
    tl.debug_barrier()
    tl.store(base + (start + order).to(tl.int64)[:, None] * WORDS, rows, mask=moved)


def launch(stores: Stores, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    """compaction.reference in one launch."""
    first = stores.tensors[0]
    _, groups, _, d = first.shape
    row = d * first.element_size()
    size = next(size for size in (8, 4, 2) if row % size == 0)
    units = size // first.element_size()
    words = row // size
    _compact_kernel[(len(stores.tensors), groups, len(slots))](
        stores.pointers,
        slots,
        starts,
        paths,
        counts,
        first.stride(0) // units,
        first.stride(1) // units,
        LONGEST=paths.shape[1],
        WORDS=words,
        BLOCK_L=triton.next_power_of_2(paths.shape[1]),
        BLOCK_W=triton.next_power_of_2(words),
        BYTES=size,
        num_warps=4,
    )


def specimens() -> list[Specimen]:
    """Paths of 8 and of 64 nodes, rows of 128 bfloat16 numbers."""
    signature = {
        "pointers": "*i64",
        **dict.fromkeys(("slots", "starts", "paths", "counts"), "*i32"),
        **dict.fromkeys(("slot_stride", "head_stride"), "i32:16"),
    }
    return [
        Specimen(
            f"compaction.{longest}",
            _compact_kernel,
            signature,
            {"LONGEST": longest, "WORDS": 32, "BLOCK_L": longest, "BLOCK_W": 32, "BYTES": 8},
            4,
            3,
        )
        for longest in (8, 64)
    ]
