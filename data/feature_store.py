"""The feature store: a folder with what training reads of the target, a packed row at a time.

    store.json                  whose states these are, and which rows each shard holds
    shard-00000.safetensors     `row-000012.taps`, `.last`, ... (feature_codec.NAMES) of its rows
    shard-00000.json            its checksums; written last, so a shard that has one is whole

Rows are memory-mapped and read in any order. What is read for the first time is checked against its
sha256, and every shard repeats whose states it holds: bytes that are damaged, or another store's,
are never trained on. docs/features.md has the format.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headsmith.data.feature_codec import NAMES
from headsmith.errors import HeadsmithError
from headsmith.files import write_atomic, write_json

SCHEMA = "headsmith.features/1"
INFO = "store.json"
# How messages call what `about` holds.
WORDS = {
    "target": "the target's fingerprint",
    "computed": "how the states are computed",
    "taps": "the taps",
    "tap_norm": "the norm of the taps",
    "last_norm": "the norm of the last state",
    "width": "the target's width",
    "dtype": "the dtype",
    "data": "the fingerprint of the prepared data",
    "row_tokens": "data.row_tokens",
    "rows": "the hash of the packed rows",
}


@dataclass
class Store:
    """A store on disk. about: whose states (the keys of WORDS). shards[s]: the packed rows in shard
    s. `made` is for people: what the store was made from, and where.
    """

    folder: Path
    about: dict[str, Any]
    shards: list[list[int]]
    made: dict[str, Any] = field(default_factory=dict)
    _sound: set[int] = field(default_factory=set, init=False, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Store:
        """The store in a folder; HeadsmithError if there is none, or its index is damaged."""
        path = Path(folder) / INFO
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["schema"] != SCHEMA:
                raise HeadsmithError(
                    f"{path} is of the schema {found['schema']}, this version reads {SCHEMA}; "
                    "capture the features again"
                )
            shards = [[int(row) for row in shard["rows"]] for shard in found["shards"]]
            return cls(path.parent, dict(found["about"]), shards, dict(found["made"]))
        except (FileNotFoundError, NotADirectoryError):
            raise HeadsmithError(
                f"{folder} holds no features: there is no {INFO} in it; make them with "
                "`headsmith data capture`"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeadsmithError(
                f"{path} cannot be read ({error!r}); it is damaged, get it again"
            ) from error

    def save(self) -> None:
        """Write the index."""
        shards = [
            {"file": self.file(number).name, "rows": rows}
            for number, rows in enumerate(self.shards)
        ]
        index = {"schema": SCHEMA, "about": self.about, "made": self.made, "shards": shards}
        write_json(self.folder / INFO, index)

    def file(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05}.safetensors"

    def sums(self, shard: int) -> Path:
        """The checksums of a shard."""
        return self.folder / f"shard-{shard:05}.json"

    def is_done(self, shard: int) -> bool:
        return self.sums(shard).is_file()

    @property
    def done(self) -> int:
        """How many shards are whole."""
        return sum(map(self.is_done, range(len(self.shards))))

    @cached_property
    def shard_of(self) -> dict[int, int]:
        """The shard of every packed row."""
        return {row: shard for shard, rows in enumerate(self.shards) for row in rows}

    def write(self, shard: int, rows: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Write a shard from the tensors of its rows, then its checksums. The same rows give the
        same bytes.
        """
        tensors = {
            f"row-{row:06}.{name}": tensor
            for row, found in rows.items()
            for name, tensor in found.items()
        }
        metadata = {"headsmith": json.dumps({"schema": SCHEMA, **self.about}, sort_keys=True)}
        sums: dict[str, Any] = {}

        def fill(path: Path) -> None:
            save_file(tensors, path, metadata)
            sums.update(checksums(path))

        write_atomic(self.file(shard), fill)
        write_json(self.sums(shard), sums)

    def read(self, row: int) -> dict[str, Tensor]:
        """The tensors of a row, by NAMES, of a shard that is done. They lie in the file."""
        file, name = self.file(self.shard_of[row]), f"row-{row:06}"
        try:
            with safe_open(file, framework="pt") as handle:
                metadata, there = handle.metadata(), set(handle.keys())
                found = {
                    kind: handle.get_tensor(f"{name}.{kind}")
                    for kind in NAMES
                    if f"{name}.{kind}" in there
                }
        except (SafetensorError, OSError) as error:
            raise HeadsmithError(f"{file} is damaged ({error}); {_remedy(file)}") from error
        if row not in self._sound:
            sums = self.read_sums(self.shard_of[row])
            self._check_header(file, sums, metadata)
            _check_tensors(file, name, found, sums["parts"])
            self._sound.add(row)
        return found

    def read_sums(self, shard: int) -> dict[str, Any]:
        path = self.sums(shard)
        try:
            sums = json.loads(path.read_text(encoding="utf-8"))
            assert {"bytes", "sha256", "parts"} <= sums.keys()
        except (OSError, ValueError, AssertionError, AttributeError) as error:
            raise HeadsmithError(f"{path} cannot be read ({error!r}); {_remedy(path)}") from error
        return dict(sums)

    def _check_header(self, file: Path, sums: dict[str, Any], metadata: Any) -> None:
        """The header is the one that was written, and names this store."""
        with open(file, "rb") as stream:
            header = stream.read(sums["parts"]["header"]["bytes"])
        if hashlib.sha256(header).hexdigest() != sums["parts"]["header"]["sha256"]:
            raise HeadsmithError(f"{file} is damaged in its header; {_remedy(file)}")
        about = json.loads((metadata or {}).get("headsmith", "{}"))
        other = difference(about, self.about, self.about.keys())
        if other:
            raise HeadsmithError(f"{file} is of another store: {other}; remove it")


def _check_tensors(
    file: Path, row: str, found: Mapping[str, Tensor], parts: Mapping[str, Any]
) -> None:
    """What was read of a row is what was written of it."""
    written = {kind for kind in NAMES if f"{row}.{kind}" in parts}
    if not written or written != found.keys():
        raise HeadsmithError(f"{file} does not hold {row}; {_remedy(file)}")
    for kind, tensor in found.items():
        held = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        if hashlib.sha256(held).hexdigest() != parts[f"{row}.{kind}"]["sha256"]:
            raise HeadsmithError(f"{file} is damaged in {row}.{kind}; {_remedy(file)}")


def check_shard(store: Store, shard: int) -> list[str]:
    """What is wrong with the bytes of a shard that is done, a line a damaged part: the file, the
    tensor and its place. Empty if they are those that were written.
    """
    file, sums = store.file(shard), store.read_sums(shard)
    if not file.is_file():
        return [f"{file} is missing"]
    size = file.stat().st_size
    if size != sums["bytes"]:
        return [f"{file} has {size} bytes, {sums['bytes']} were written"]
    faults, whole = [], hashlib.sha256()
    with open(file, "rb") as stream:
        for name, part in sums["parts"].items():
            start = stream.tell()
            if _hash(stream, part["bytes"], whole) != part["sha256"]:
                faults.append(f"{file}: {name} is damaged (bytes {start} to {stream.tell()})")
    if not faults and whole.hexdigest() != sums["sha256"]:
        faults.append(f"{store.sums(shard)} is damaged: its sums contradict each other")
    return faults


def checksums(file: Path) -> dict[str, Any]:
    """bytes and sha256 of a safetensors file, and of its parts in the order of the file: the header
    and every tensor.
    """
    whole, parts = hashlib.sha256(), {}
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        stream.seek(0)
        places = {name: entry["data_offsets"] for name, entry in header.items() if name[0] != "_"}
        ordered = sorted(places.items(), key=lambda item: (item[1], item[0]))
        sizes = {"header": 8 + length} | {name: end - start for name, (start, end) in ordered}
        for name, size in sizes.items():
            parts[name] = {"bytes": size, "sha256": _hash(stream, size, whole)}
    return {"bytes": sum(sizes.values()), "sha256": whole.hexdigest(), "parts": parts}


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any], keys: Any) -> str | None:
    """The first of `keys` in which what a store was made from is not what is wanted, in words."""
    for key in keys:
        if found.get(key) != wanted[key]:
            return f"{WORDS.get(key, key)} is {found.get(key)} there and {wanted[key]} here"
    return None


def cut(order: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Shards of rows in the given order, each of at most `limit` bytes or of one row."""
    shards: list[list[int]] = []
    room = 0
    for row in order:
        if not shards or sizes[row] > room:
            shards.append([])
            room = limit
        shards[-1].append(int(row))
        room -= sizes[row]
    return shards


def _hash(stream: Any, size: int, whole: Any) -> str:
    """sha256 of the next `size` bytes, which also go into `whole`."""
    digest = hashlib.sha256()
    while size:
        block = stream.read(min(size, 1 << 20))
        if not block:
            break
        digest.update(block)
        whole.update(block)
        size -= len(block)
    return digest.hexdigest()


def _remedy(file: Path) -> str:
    return f"remove {file.stem}.* and capture again: only that is made anew"
