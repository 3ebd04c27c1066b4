"""Filling a feature store: shard by shard, each whole or absent, so that a killed capture goes on
where it stopped and leaves the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from headsmith.data.feature_codec import encode
from headsmith.data.feature_store import INFO, Store, cut, difference
from headsmith.data.pack import Row
from headsmith.data.states import States
from headsmith.errors import EnvironmentFault, HeadsmithError

# How long to try for a lock that a reader may be holding for a moment.
_SECONDS_FOR_A_LOCK = 2.0


def capture(
    store: Store,
    shards: Iterable[int],
    states: Callable[[int], States],
    progress: Callable[[int, int], None],
) -> None:
    """Write those of `shards` that are not done; `states` gives the states of a packed row.

    `progress` gets a row's number and its bytes after each.
    """
    for shard in shards:
        if store.is_done(shard):
            continue
        rows = {}
        for row in store.shards[shard]:
            rows[row] = encode(states(row), store.about["dtype"])
            progress(row, sum(tensor.nbytes for tensor in rows[row].values()))
        store.write(shard, rows)


def clear_temporaries(store: Store, shard: int) -> None:
    """Remove what a killed process left half written of a shard."""
    for name in (store.file(shard).name, store.sums(shard).name):
        for path in store.folder.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)


def plan(
    folder: Path, about: dict[str, Any], shards: list[list[int]], made: dict[str, Any]
) -> Store:
    """The store to fill: the one in `folder`, if it is of the same states, or a new one.

    A store that was begun keeps its own division into shards. Raises HeadsmithError when it is of
    other states, with the difference.
    """
    for path in folder.glob(f".{INFO}.*.tmp"):
        path.unlink(missing_ok=True)
    if not (folder / INFO).is_file():
        store = Store(folder, about, shards, made)
        store.save()
        return store
    store = Store.open(folder)
    other = difference(store.about, about, about)
    if other:
        raise HeadsmithError(
            f"{folder} holds other features: {other}; choose another --out, or remove it"
        )
    return store


def check_room(store: Store, sizes: list[int]) -> None:
    """EnvironmentFault when the disk has no room for what is missing; sizes[row] in bytes."""
    missing = (s for number, s in enumerate(store.shards) if not store.is_done(number))
    needed = sum(sizes[row] for shard in missing for row in shard)
    free = shutil.disk_usage(store.folder).free
    if needed > free:
        raise EnvironmentFault(
            f"the features need {needed / 1e9:.1f} GB more and {store.folder} has "
            f"{free / 1e9:.1f} GB free; use --dtype fp8, fewer rows (data.max_rows) or another disk"
        )


def rows_sha256(rows: Iterable[Row]) -> str:
    """Hash over the ids, masks and document lengths of all packed rows, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(torch.tensor([len(row.lengths), *row.lengths]).numpy().tobytes())
        digest.update(row.ids.to(torch.int32).numpy().tobytes())
        digest.update(row.mask.to(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def plan_shards(order: Iterable[int], sizes: list[int], megabytes: float) -> list[list[int]]:
    """Shards in the order in which rows are first trained, so that training can follow closely."""
    return cut(list(order), sizes, int(megabytes * 10**6))


@contextmanager
def capturing(folder: Path, rank: int = 0) -> Iterator[None]:
    """Hold the lock that tells others that rank `rank` of a capture into `folder` is alive.

    The system lets go of it however the process ends. HeadsmithError if another one holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise HeadsmithError(
            f"--out {folder} cannot be a folder, a file is in the way; choose another path"
        ) from error
    with open(_lock(folder, rank), "a") as file:
        deadline = time.monotonic() + _SECONDS_FOR_A_LOCK
        while not _locks(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise HeadsmithError(
                    f"another process is capturing into {folder}; wait for it, or choose another "
                    "--out"
                )
            time.sleep(0.05)
        yield


def is_capturing(folder: Path) -> bool:
    """Whether a capture into `folder` is alive."""
    for path in folder.glob(".capturing-*"):
        with open(path) as file:
            if not _locks(file, fcntl.LOCK_SH):
                return True
    return False


def _lock(folder: Path, rank: int) -> Path:
    return folder / f".capturing-{rank}"


def _locks(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
