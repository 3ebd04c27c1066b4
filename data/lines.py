"""Long files of JSON lines: rows wait in a file, not in memory, until their order is known."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

from headsmith.errors import HeadsmithError
from headsmith.files import write_atomic


class Spool:
    """Lines in a nameless temporary file, to be written out in any order.

    It lies beside the file that it is for: the folder of temporary files may be a small one.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._file: IO[bytes] | None = None
        self._places: list[tuple[int, int]] = []
        self._end = 0

    def __enter__(self) -> Spool:
        check_out(self.out)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self.out.parent)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, line: bytes) -> int:
        """Keeps a line; returns its number, from 0."""
        assert self._file is not None
        self._file.seek(self._end)
        self._file.write(line)
        self._places.append((self._end, len(line)))
        self._end += len(line)
        return len(self._places) - 1

    def write(self, order: Iterable[int] | None = None) -> None:
        """Writes the lines of those numbers, or all of them, to the file, which is whole or not
        there.
        """
        spooled = self._file
        assert spooled is not None

        def copy(path: Path) -> None:
            with path.open("wb") as file:
                for number in range(len(self)) if order is None else order:
                    place, length = self._places[number]
                    spooled.seek(place)
                    file.write(spooled.read(length))

        write_atomic(self.out, copy)


def check_out(out: Path, sources: Iterable[str] = ()) -> None:
    """HeadsmithError when `out` cannot be a file of lines, or is one of the sources."""
    if out.is_dir():
        raise HeadsmithError(
            f"{out} is a folder; name a file for the rows, such as {out}/rows.jsonl"
        )
    if any(Path(source).exists() and out.exists() and out.samefile(source) for source in sources):
        raise HeadsmithError(f"{out} is also read; choose another --out")
