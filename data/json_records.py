"""Records out of JSON arrays and JSON Lines, streamed, whatever shape the file is in.

A damaged array gives the records before the damage; a bad line costs that line alone.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headsmith.data.notes import LAYOUTS, Notes
from headsmith.errors import HeadsmithError

_CHUNK = 1 << 20
_BETWEEN_RECORDS = re.compile(r"[\s,]*")
# How far before the end of what was read a syntax error may lie and still be a record cut in two.
_MARGIN = 16


class _Window:
    """A sliding piece of a UTF-8 file that knows the byte offset of its characters."""

    def __init__(self, path: Path, file: BinaryIO, notes: Notes) -> None:
        self.path, self.file, self.notes = path, file, notes
        self.text = ""
        self.at = 0
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._base = 3 if file.read(3) == codecs.BOM_UTF8 else file.seek(0)

    def byte(self, at: int | None = None) -> int:
        """Offset in the file of the character `at` (the current one unless given)."""
        return self._base + len(self.text[: self.at if at is None else at].encode())

    def grow(self) -> bool:
        """Drop what was read past and read as much again as is left; False at the end of the file.

        Doubling keeps the total work linear when one record is far larger than a chunk.
        """
        self._base = self.byte()
        self.text, self.at = self.text[self.at :], 0
        chunk = self.file.read(max(_CHUNK, len(self.text)))
        try:
            self.text += self._decode.decode(chunk)
        except UnicodeDecodeError as error:
            # The decoder may still have held the first bytes of a character.
            byte = self.file.tell() - len(error.object) + error.start
            raise HeadsmithError(
                f"{self.path} is not UTF-8 at byte {byte}; convert it to UTF-8"
            ) from error
        self.notes.done += len(chunk)
        return bool(chunk)

    def peek(self) -> str:
        """The first character of what comes next; empty at the end of the file."""
        while True:
            match = _BETWEEN_RECORDS.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""


def json_array(path: Path, notes: Notes) -> Iterator[object]:
    notes.total += path.stat().st_size
    scan = json.JSONDecoder().raw_decode
    count = 0
    with path.open("rb") as file:
        window = _Window(path, file, notes)
        opening = window.peek()
        assert opening == "[", "located as an array"
        window.at += 1
        while (following := window.peek()) != "]":
            try:
                if not following:
                    raise json.JSONDecodeError("the array does not end", window.text, window.at)
                record, end = scan(window.text, window.at)
            except json.JSONDecodeError as error:
                if _may_be_incomplete(error, window.text) and window.grow():
                    continue
                notes.warnings.append(_cut_off(window, count, error))
                return
            window.at = end
            count += 1
            yield record


def _may_be_incomplete(error: json.JSONDecodeError, text: str) -> bool:
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _MARGIN


def _cut_off(window: _Window, count: int, error: json.JSONDecodeError) -> str:
    path, start = window.path, window.byte()
    if _may_be_incomplete(error, window.text):
        size = path.stat().st_size
        what = f"inside the record that begins at byte {start}" if start < size else "unclosed"
        return (
            f"{path} is cut off: it ends at byte {size} {what}; the {count} records before are read"
        )
    return (
        f"{path} is damaged at byte {window.byte(error.pos)} ({error.msg}), in the record that "
        f"begins at byte {start}; the {count} records before are read"
    )


def json_lines(path: Path, notes: Notes) -> Iterator[object]:
    notes.total += path.stat().st_size
    bad: list[int] = []
    good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            notes.done += len(line)
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
            except ValueError:
                bad.append(number)
                notes.skipped["line is not JSON"] += 1
                continue
            good += 1
            yield record
    if bad and not good:
        raise HeadsmithError(
            f"{path} is not JSON Lines: none of its {len(bad)} lines is a JSON value; "
            f"it should hold conversations as {LAYOUTS}"
        )
    if bad:
        shown = ", ".join(map(str, bad[:10])) + (", ..." if len(bad) > 10 else "")
        notes.warnings.append(f"{path}: {len(bad)} lines are not JSON and are left out: {shown}")
