"""`headsmith train --profile`: where the seconds and the bytes of a step go, stage by stage.

A run is cut into stretches of time, each of which belongs to one stage; nothing is counted twice.
Seconds come from plain timers. Bytes come from torch's profiler, which watches one step (not
counted in the seconds): how far the memory that torch has allocated rises above where it stood
when the stage began.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# The step whose bytes are watched, from 0; the one before it has made what stays.
WATCHED = 1
OTHER = "other"
_ORDER = (
    "data",
    "target",
    "unroll step",
    "loss",
    "loss backward",
    "backward step",
    "optimiser",
    OTHER,
)


class Stages:
    """Seconds of every stage, and the bytes it rises by (None before step `WATCHED`)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] | None = None
        self.steps = 0
        self._name, self._since = OTHER, 0
        # Nothing counts outside of steps: the fit of a fresh head, checkpoints, validation.
        self._counts = False
        # While a step is watched: when each stage began, on the profiler's clock but for a shift.
        self._watched: list[tuple[int, str]] | None = None
        self._seen = 0

    def switch(self, name: str) -> str:
        """From now on it is stage `name`; returns the one before."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, before = time.perf_counter_ns(), self._name
        if self._counts:
            spent = (now - self._since) / 1e9
            self.seconds[before] = self.seconds.get(before, 0.0) + spent
        if self._watched is not None:
            self._watched.append((now, name))
        self._name, self._since = name, now
        return before

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimiser step."""
        number, self._seen = self._seen, self._seen + 1
        self.switch(OTHER)
        if number == WATCHED:
            self._watched = []
            with torch.profiler.profile(profile_memory=True) as profiler:
                with torch.profiler.record_function(_START):
                    self.switch(OTHER)
                yield
                self.switch(OTHER)
            switches, self._watched = self._watched, None
            self.bytes = rises(profiler.profiler.kineto_results.events(), switches)
            return
        self._counts = True
        yield
        self.switch(OTHER)
        self._counts = False
        self.steps += 1

    def table(self) -> str:
        """A line a stage, in the order of a step."""
        names = sorted(
            self.seconds, key=lambda name: (_ORDER.index(name.rstrip(" 0123456789")), name)
        )
        total = sum(self.seconds.values()) or 1.0
        lines = [f"{'stage':<18}{'s/step':>10}{'share':>8}{'MiB':>10}"]
        for name in names:
            spent = self.seconds.get(name, 0.0)
            rise = "-" if self.bytes is None else f"{self.bytes.get(name, 0) / 2**20:.1f}"
            per_step = spent / max(self.steps, 1)
            lines.append(f"{name:<18}{per_step:>10.4f}{spent / total:>8.1%}{rise:>10}")
        return "\n".join(lines)


_START = "headsmith: a step begins"
_MEMORY = "[memory]"
_current: Stages | None = None


def rises(events: list[Any], switches: list[tuple[int, str]]) -> dict[str, int]:
    """The most bytes that each stage's allocations rose by above its beginning, from the
    profiler's events and the times of the switches.
    """
    start = next(event.start_ns() for event in events if event.name() == _START)
    shift = start - switches[0][0]
    changes = sorted(
        (event.start_ns() - shift, event.nbytes()) for event in events if event.name() == _MEMORY
    )
    found: dict[str, int] = {}
    position, allocated = 0, 0
    ends = [moment for moment, _ in switches[1:]]
    for (_, name), end in zip(switches, ends, strict=False):
        base = peak = allocated
        while position < len(changes) and changes[position][0] < end:
            allocated += changes[position][1]
            peak = max(peak, allocated)
            position += 1
        found[name] = max(found.get(name, 0), peak - base)
    return found


@contextmanager
def profiling() -> Iterator[Stages]:
    """Within this block the stages of all steps are timed."""
    global _current
    before, _current = _current, Stages()
    try:
        yield _current
    finally:
        _current = before


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs in this block is stage `name`; nothing happens unless the run is profiled."""
    if _current is None:
        yield
        return
    before = _current.switch(name)
    try:
        yield
    finally:
        _current.switch(before)


@contextmanager
def whole_step() -> Iterator[None]:
    """What runs in this block is one optimiser step."""
    if _current is None:
        yield
        return
    with _current.step():
        yield


def backward_from(tensor: Tensor, name: str) -> None:
    """The backward is stage `name` from when the gradient of `tensor` is there."""
    stages = _current
    if stages is None or not tensor.requires_grad:
        return

    def note(_: Tensor) -> None:
        stages.switch(name)

    tensor.register_hook(note)
