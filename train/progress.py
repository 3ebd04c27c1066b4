"""What a person sees while a head trains: a bar in a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Shows the steps of a run on stderr; silent on every rank but the first.

    The rate and the ETA count from the first step of this process, not of a run that it resumes.
    """

    def __init__(self, total: int, done: int, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.total, self.first = total, done
        self.started = time.monotonic()
        self.last_line = -SECONDS_BETWEEN_LINES
        self.tokens = 0
        self.bar: Progress | None = None
        if self.console.is_terminal and not quiet:
            columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self.task = self.bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Report:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exit_info: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, line: str) -> None:
        """A line that stays, above the bar where there is one."""
        self.console.print(line, markup=False, soft_wrap=True)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one optimiser step, from the record that goes to metrics.jsonl."""
        self.tokens += record["tokens"]
        elapsed = time.monotonic() - self.started
        accuracy = " ".join(f"{value:.2f}" for value in record["accuracy"])
        speed = f"{self.tokens / elapsed:.0f} tok/s"
        self.show(record["step"], f"loss {record['loss']:.3f}  acc {accuracy}  {speed}")

    def show(self, done: int, text: str) -> None:
        """Show that `done` of all steps are done, and what there is to say of the last one."""
        if self.bar:
            self.bar.update(self.task, completed=done, description=text)
            return
        now = time.monotonic()
        if done == self.total or now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            left = (self.total - done) * (now - self.started) / (done - self.first)
            self.say(f"step {done}/{self.total}  {text}  {_clock(left)} left")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
