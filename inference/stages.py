"""What a round of the decoder spends its time on: named stages, timed only while somebody watches.

    target pass     the target's blocks over all nodes
    target lm_head  its output matrix (and argmax, where one kernel does both)
    draft input     what was committed, through the head's input and layer
    draft layer     the head's layer over drafted nodes
    draft lm_head   the ids that it finds likeliest
    draft heads     all Medusa heads
    tree build      choosing nodes, and the finished trees
    verify          choices, the paths that are kept, the token behind
    compaction      accepted nodes to their rows of the cache

Stages do not overlap; what is in none of them is the host's work between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from headsmith.inference.records import Phases


@dataclass(slots=True)
class Stages:
    """Wall seconds of every call of every stage, the device's work included."""

    device: torch.device
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_watched: Stages | None = None


@contextmanager
def watching_stages(stages: Stages) -> Iterator[None]:
    """Add the stages that run within this block, which on a GPU then wait for it to finish each."""
    global _watched
    before, _watched = _watched, stages
    try:
        yield
    finally:
        _watched = before


def staged() -> bool:
    """Whether somebody watches."""
    return _watched is not None


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs within this block is of that stage."""
    stages = _watched
    if stages is None:
        yield
        return
    stages.synchronise()
    begin = time.perf_counter()
    yield
    stages.synchronise()
    stages.seconds.setdefault(name, []).append(time.perf_counter() - begin)


@contextmanager
def timed(phases: Phases, phase: str, device: torch.device) -> Iterator[None]:
    """Add the wall time of this block to a phase, the device's work included."""
    clock = Stages(device)
    clock.synchronise()
    begin = time.perf_counter()
    yield
    clock.synchronise()
    setattr(phases, phase, getattr(phases, phase) + time.perf_counter() - begin)
