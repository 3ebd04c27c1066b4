"""Raw records out of files, folders and the Hub, one at a time.

Nothing here knows what a conversation is: a reader yields whatever the source holds as one record.
A source is recognised when it is located, so a wrong path fails before any work is done; reading
is streamed, so a file may be far larger than memory.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from headsmith.data.hub import hub_records, is_hub_id
from headsmith.data.json_records import json_array, json_lines
from headsmith.data.notes import FILE_SUFFIXES, LAYOUTS, LINE_SUFFIXES, Notes, first_line
from headsmith.errors import HeadsmithError

_SNIFF = 1 << 16
_ROWS = 256

Reader = Callable[[Notes], Iterator[object]]


def locate(source: str | Path, split: str | None = None, revision: str | None = None) -> Reader:
    """The reader for a file, a folder or a Hub data set id; HeadsmithError if it is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, split)
    if path.is_file():
        return _file(path)
    if is_hub_id(source):
        return lambda notes: hub_records(str(source), split or "train", revision)
    raise HeadsmithError(
        f"there is no file, folder or Hub data set called {source}; check the path"
    )


def _file(path: Path) -> Reader:
    with path.open("rb") as file:
        start = file.read(_SNIFF).removeprefix(codecs.BOM_UTF8).lstrip()
    if not start:
        raise HeadsmithError(f"{path} is empty; it should hold conversations as {LAYOUTS}")
    if start.startswith(b"PAR1"):
        return lambda notes: _parquet(path, notes)
    if path.suffix == ".arrow" or start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return lambda notes: _arrow(path, notes)
    if path.suffix in LINE_SUFFIXES or start.startswith(b"{"):
        return lambda notes: json_lines(path, notes)
    if start.startswith(b"["):
        return lambda notes: json_array(path, notes)
    raise HeadsmithError(f"{path} is not {LAYOUTS}; convert it to one of them")


def _folder(path: Path, split: str | None) -> Reader:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return lambda notes: _saved_dataset(path, split, notes)
    files = sorted(f for f in path.rglob("*") if f.suffix in FILE_SUFFIXES and f.is_file())
    if not files:
        raise HeadsmithError(f"the folder {path} holds no data; it should hold {LAYOUTS} files")
    readers = [_file(file) for file in files]
    return lambda notes: (record for reader in readers for record in reader(notes))


def _arrow(path: Path, notes: Notes) -> Iterator[object]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            yield from _rows(_arrow_batches(file))
    except (pa.ArrowInvalid, OSError) as error:
        raise HeadsmithError(f"{path} cannot be read as Arrow ({first_line(error)})") from error


def _arrow_batches(file: Any) -> Iterator[Any]:
    import pyarrow as pa

    try:
        yield from pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        # Arrow has a second layout, with its index at the end of the file.
        file.seek(0)
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


def _parquet(path: Path, notes: Notes) -> Iterator[object]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _rows(file.iter_batches(batch_size=_ROWS))
    except (pa.ArrowInvalid, OSError) as error:
        raise HeadsmithError(f"{path} cannot be read as Parquet ({first_line(error)})") from error


def _rows(batches: Iterable[Any]) -> Iterator[object]:
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            yield from batch.slice(start, _ROWS).to_pylist()


def _saved_dataset(path: Path, split: str | None, notes: Notes) -> Iterator[object]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        raise HeadsmithError(
            f"the folder {path} cannot be read as an Arrow data set ({first_line(error)})"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        name = split or ("train" if "train" in saved else next(iter(saved), ""))
        if name not in saved:
            raise HeadsmithError(f"{path} has no split {name}; it has {', '.join(saved)}")
        saved = saved[name]
    notes.total += len(saved)
    for record in saved:
        notes.done += 1
        yield record
