"""The process made ready for thousands of equal steps, once all is loaded."""

from __future__ import annotations

import ctypes
import gc

# malloc.h of glibc: what is free at the end of the heap goes back to the system beyond the first
# number of bytes, and what is larger than the second is not of the heap at all.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = 1 << 30


def settle() -> None:
    """Keep what the process has. Python's collector no longer goes through what exists by now, and
    memory that a step frees stays for the next one, which would have every page of it cleared anew
    by the system: a few percent of a step on a CPU.
    """
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            mallopt(threshold, _NEVER)
