"""Atomic writes: a reader sees the old file or the new one, never half of one.

Everything is written beside its destination and renamed, so a killed run leaves at most a
hidden `.NAME.*.tmp` behind and never a checkpoint that looks whole but is not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headsmith.errors import EnvironmentFault, HeadsmithError

# There is no way to read the mask without setting it, so it is read once, before any thread runs.
_UMASK = os.umask(0)
os.umask(_UMASK)

_FULL_SIGNS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "PytorchStreamWriter failed")


def cache_dir() -> Path:
    """Folder for what is fetched or converted once: `$HEADSMITH_HOME` or `~/.cache/headsmith`."""
    home = os.environ.get("HEADSMITH_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "headsmith"


def write_atomic(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling of `path`, then rename it to `path`.

    Raises EnvironmentFault if the disk is full; the temporary file is removed on any failure.
    """
    path = Path(path)
    with _disk_full_is_a_fault(path), _parents(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            _sync(temporary)
            # mkstemp makes files that only their owner can read; a result is for everybody.
            temporary.chmod(0o666 & ~_UMASK)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def write_json(path: str | Path, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically; NaN and infinity are refused (ValueError)."""
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling folder that becomes `path` when the block succeeds.

    An existing `path` is replaced only then. On any failure the temporary folder is removed and
    `path` stays as it was. Raises EnvironmentFault if the disk is full.
    """
    path = Path(path)
    with _filled_beside(path) as temporary:
        yield temporary
        for child in temporary.rglob("*"):
            if child.is_file():
                _make_lasting(child)
        temporary.chmod(0o777 & ~_UMASK)
        _swap_in(temporary, path)


@contextmanager
def atomic_files(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder whose files move into `folder` when the block succeeds.

    Files of the same names are replaced and others stay. On any failure no file is there that was
    not before. Raises EnvironmentFault if the disk is full.
    """
    folder = Path(folder)
    with _filled_beside(folder) as temporary, _parents(folder / "file"):
        yield temporary
        for child in sorted(temporary.iterdir()):
            _make_lasting(child)
            os.replace(child, folder / child.name)


def weights_sha256(folder: str | Path) -> str | None:
    """Hash over the weight files of a checkpoint folder, in the order of their names."""
    files = sorted(
        path for path in Path(folder).iterdir() if path.suffix in (".safetensors", ".bin", ".pt")
    )
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() if files else None


@contextmanager
def _filled_beside(path: Path) -> Iterator[Path]:
    """A temporary sibling folder of `path`, gone at the end whatever happens."""
    with _disk_full_is_a_fault(path), _parents(path):
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the folders above `path`; those that were made here go again if the block fails."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise HeadsmithError(
            f"{path.parent} cannot be a folder, a file is in the way; choose another path"
        ) from error
    try:
        yield
    except BaseException:
        # Only what is empty goes: another process may have written there meanwhile.
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()
        raise


def _make_lasting(file: Path) -> None:
    file.chmod(0o666 & ~_UMASK)
    _sync(file)


def _swap_in(temporary: Path, path: Path) -> None:
    if not path.exists():
        os.replace(temporary, path)
        return
    # A folder that is not empty cannot be renamed over: step the old one aside first.
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    os.replace(path, aside)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.replace(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception means that the disk, or the user's quota on it, is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors and torch.save write from native code and keep only the text, if that.
    return any(sign in str(error) for sign in _FULL_SIGNS)


@contextmanager
def _disk_full_is_a_fault(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise EnvironmentFault(
                f"the disk is full while writing {path}; free some space and run again"
            ) from error
        raise


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
