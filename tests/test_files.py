"""Atomic writes: whatever interrupts them, the old content or the new one is there, whole."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.files import (
    atomic_files,
    atomic_folder,
    cache_dir,
    write_atomic,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSMITH_HOME", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("HEADSMITH_HOME")
    assert cache_dir() == Path.home() / ".cache" / "headsmith"


def test_write_makes_the_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_text(path, "hé\n")
    write_text(path, "later\n")
    assert path.read_bytes() == b"later\n"
    assert names(path.parent) == ["b.txt"]
    assert path.stat().st_mode & 0o400 and path.stat().st_mode & 0o044 == 0o666 & 0o044


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_text(path, "old")

    def half(temporary: Path) -> None:
        temporary.write_text("ne")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_the_environments_fault(tmp_path: Path, error: Exception) -> None:
    def full(temporary: Path) -> None:
        raise error

    with pytest.raises(EnvironmentFault, match="disk is full while writing .*x; free"):
        write_atomic(tmp_path / "x", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        with atomic_folder(tmp_path / "y"):
            raise error
    assert names(tmp_path) == []


def test_json_refuses_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"tau": 1.5, "name": "é"})
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {"tau": 1.5, "name": "é"}
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"tau": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text("utf-8"))["tau"] == 1.5


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with atomic_folder(path) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not path.exists()
    assert (path / "sub" / "a").read_text() == "1"

    with pytest.raises(KeyboardInterrupt):
        with atomic_folder(path) as temporary:
            (temporary / "half").write_text("")
            raise KeyboardInterrupt
    assert names(tmp_path) == ["checkpoint"] and names(path) == ["sub"]

    with atomic_folder(path) as temporary:
        (temporary / "b").write_text("2")
    assert names(tmp_path) == ["checkpoint"] and names(path) == ["b"]


def test_files_arrive_together_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    with pytest.raises(ValueError), atomic_files(folder) as temporary:
        (temporary / "a").write_text("1")
        raise ValueError
    assert not list(tmp_path.iterdir()), "folders that were made for it are gone too"
    folder.mkdir(parents=True)
    (folder / "mine").write_text("kept")
    (folder / "a").write_text("old")
    with atomic_files(folder) as temporary:
        (temporary / "a").write_text("new")
        assert (folder / "a").read_text() == "old"
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"a": "new", "mine": "kept"}
    assert [p.name for p in folder.parent.iterdir()] == ["out"]


def test_a_file_where_a_folder_should_be_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadsmithError, match="a file is in the way"):
        write_text(tmp_path / "file" / "x", "")
