"""Ctrl-C and SIGTERM: the first asks for a checkpoint and an orderly end, the second ends it."""

from __future__ import annotations

import signal
import sys
from types import FrameType


class Interrupt:
    """Catches both signals while it is entered; `number` is the one that came, 0 for none.

    With `deferred` set to False a signal ends the process where it stands, for phases in which
    there is nothing left to save.
    """

    def __init__(self) -> None:
        self.number = 0
        self.deferred = True

    def __enter__(self) -> Interrupt:
        self.previous = {n: signal.signal(n, self._on) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exit_info: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self.number or not self.deferred:
            print("headsmith: stopped; the last checkpoint is whole", file=sys.stderr)
            raise SystemExit(128 + number)
        self.number = number
