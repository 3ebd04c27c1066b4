"""Every answer in a file as soon as it is there, so that a run goes on after any kill.

The first line holds the settings that the texts depend on; a run with others is refused, with
their names. Each line behind it is an answer, or why a conversation ends before one. A line that a
kill cut off is cut off for good. Only where the answers stand in the file is kept in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from headsmith.data.chats import line_of
from headsmith.data.onpolicy.asking import ANSWERED, Answer, Ask, Status
from headsmith.errors import HeadsmithError

SCHEMA = "headsmith.answers/1"
_BEGIN = b'{"schema": "headsmith.'


@dataclass(slots=True)
class Course:
    """How far a conversation has come: where its answers stand in the journal, how each of them
    ended, and why there is none behind them (None while there can be one).
    """

    places: list[int] = field(default_factory=list)
    finish: list[Status] = field(default_factory=list)
    ended: Answer | None = None


class Journal:
    """The answers for the output `out`, in the file of `journal_of`; a context manager."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.path = journal_of(out)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.courses: dict[str, Course] = {}
        self._file: IO[bytes] | None = None
        self._end = 0
        if out.exists() and not self.path.exists():
            raise HeadsmithError(
                f"{out} is there already and nothing tells what made it ({self.path.name} is "
                "gone); choose another --out, or move the file away"
            )

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        if not self._end:
            # Nothing was answered, so there is nothing to go on from.
            self.path.unlink()
        self._file.close()

    def course(self, key: str) -> Course:
        """How far a conversation has come."""
        return self.courses.setdefault(key, Course())

    def add(self, ask: Ask, answer: Answer) -> None:
        """Writes down an answer, or why there is none."""
        line: dict[str, Any] = {"key": ask.key, "turn": ask.turn, "status": answer.status}
        if answer.status in ANSWERED:
            line["text"] = answer.text
        if answer.detail:
            line["detail"] = answer.detail
        if not self._end:
            self._append({"schema": SCHEMA, "settings": self.settings})
        self._take(line, self._append(line))

    def answers(self, key: str) -> list[str]:
        """The texts of a conversation's answers so far."""
        return [self._line(place)["text"] for place in self.course(key).places]

    def _append(self, line: dict[str, Any]) -> int:
        assert self._file is not None
        place, text = self._end, line_of(line)
        self._file.write(text)
        # Into the system's hands, where a kill of this process cannot reach it.
        self._file.flush()
        self._end += len(text)
        return place

    def _line(self, place: int) -> dict[str, Any]:
        assert self._file is not None
        self._file.seek(place)
        line: dict[str, Any] = json.loads(self._file.readline())
        return line

    def _take(self, line: dict[str, Any], place: int) -> None:
        course = self.course(line["key"])
        status, turn = line["status"], line["turn"]
        if turn != len(course.places):
            raise ValueError(f"answer {turn} of {line['key']} is out of its order")
        if status in ANSWERED:
            course.places.append(place)
            course.finish.append(status)
            course.ended = None
        else:
            course.ended = Answer(status, detail=line.get("detail", ""))

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        for number, text in enumerate(self._file, start=1):
            if not text.endswith(b"\n") and (number > 1 or text.startswith(_BEGIN[: len(text)])):
                self._file.truncate(self._end)
                break
            try:
                line = json.loads(text)
                if number == 1:
                    self._check(line)
                else:
                    self._take(line, self._end)
            except (ValueError, KeyError, TypeError) as error:
                raise HeadsmithError(
                    f"{self.path}, line {number} was not written by regenerate ({error}); choose "
                    "another --out, or delete the file to start anew"
                ) from error
            self._end += len(text)
        for course in self.courses.values():
            # What went wrong on the way may go well today.
            if course.ended is not None and course.ended.status == "error":
                course.ended = None

    def _check(self, line: dict[str, Any]) -> None:
        if line["schema"] != SCHEMA:
            raise ValueError(f"its schema is {line['schema']}")
        before = line["settings"]
        names = [
            name
            for name in dict.fromkeys([*before, *self.settings])
            if before.get(name) != self.settings.get(name)
        ]
        if names:
            said = "; ".join(
                f"{name} was {json.dumps(before.get(name))} and is "
                f"{json.dumps(self.settings.get(name))}"
                for name in names
            )
            raise HeadsmithError(
                f"{self.path} holds answers that were made with other settings ({said}); use "
                "those, choose another --out, or delete that file to start anew"
            )

    def _lock(self) -> None:
        """Two runs that append to one file would write each answer twice."""
        try:
            import fcntl
        except ImportError:  # there is none on Windows
            return
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HeadsmithError(
                f"another run is writing {self.path}; wait for it, or choose another --out"
            ) from None


def journal_of(out: Path) -> Path:
    """The journal beside an output. Its name has no suffix that a folder of data is read by."""
    return out.with_name(f"{out.name}.journal")
