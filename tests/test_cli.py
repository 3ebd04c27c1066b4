"""The command line: quick to start, and every fault ends in one sentence and the right code."""

from __future__ import annotations

import errno
import subprocess
import sys
from importlib import import_module

import click
import pytest

from headsmith import cli
from headsmith.errors import EnvironmentFault, EqualityFailed, GateNotMet, HeadsmithError


def failing(error: BaseException) -> click.Command:
    """A command that raises `error`."""

    def callback() -> None:
        raise error

    return click.Command("failing", callback=callback)


def test_help_imports_nothing_heavy() -> None:
    """What makes `--help` answer at once; its time is measured by benchmarks/startup.py."""
    probe = (
        "import sys; from headsmith.cli import cli, run; code = run(cli, ['--help'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "eval" in done.stdout and "train" in done.stdout


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(cli.cli, ["-h"]) == 0
    shown = capsys.readouterr().out
    for name, entry in cli.COMMANDS.items():
        assert name in shown and entry.help in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_listed_command_exists(name: str) -> None:
    module, attribute = cli.COMMANDS[name].where.split(":")
    assert isinstance(getattr(import_module(module), attribute), click.Command)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateNotMet("tau is 1.4, the gate asks for 1.6"), 1),
        (HeadsmithError("no such file: x"), 2),
        (EqualityFailed("token 7 differs"), 3),
        (EnvironmentFault("no network"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 4),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), 4),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 4),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 4),
        (ModuleNotFoundError("No module named 'wandb'", name="wandb"), 4),
        (MemoryError(), 4),
    ],
)
def test_a_fault_is_one_sentence_and_its_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(failing(error), []) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headsmith: error: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_a_missing_optional_library_names_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    error = ModuleNotFoundError("No module named 'deepspeed.ops'", name="deepspeed.ops")
    assert cli.run(failing(error), []) == 4
    assert "pip install 'headsmith[deepspeed]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bug",
    [ValueError("x"), ModuleNotFoundError("x", name="headsmith.typo"), OSError(errno.EIO, "")],
)
def test_our_own_bugs_keep_their_traceback(bug: Exception) -> None:
    with pytest.raises(type(bug)):
        cli.run(failing(bug), [])


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(failing(KeyboardInterrupt()), []) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["no-such-command"], ["--no-such-option"]])
def test_usage_errors_are_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(cli.cli, args) == 2
    assert args[0] in capsys.readouterr().err


def test_a_command_can_choose_its_code() -> None:
    assert cli.run(click.Command("c", callback=lambda: 3), []) == 3
    assert cli.run(click.Command("c", callback=lambda: None), []) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from headsmith import __version__

    assert cli.run(cli.cli, ["--version"]) == 0
    assert __version__ in capsys.readouterr().out
