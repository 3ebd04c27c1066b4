"""benchmarks/train_step: our step as the other programs' would be measured, and what is said when
one of those cannot be.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

RIVALS = ("speculators", "specforge")
TINY = ["--shape", "small", "--documents", "2", "--length", "16", "--draft-vocab", "64"]


def variable(rival: str) -> str:
    """What names the Python of a program's environment."""
    return f"HEADSMITH_{rival.upper()}_PYTHON"


@pytest.fixture
def compare(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks" / "train_step")
    return importlib.import_module("compare")


@pytest.mark.parametrize("rival", RIVALS)
def test_an_environment_that_nobody_named(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, rival: str
) -> None:
    monkeypatch.delenv(variable(rival), raising=False)
    result = CliRunner().invoke(compare.main, ["--against", rival])
    assert result.exit_code == 2
    assert variable(rival) in result.output


@pytest.mark.slow
@pytest.mark.parametrize("rival", RIVALS)
def test_an_environment_without_the_program(
    compare: ModuleType, tmp_path: Path, rival: str
) -> None:
    for python, word in ((tmp_path / "none", "cannot be run"), (Path(sys.executable), "No module")):
        program = ["--against", rival, "--python", str(python)]
        result = CliRunner().invoke(compare.main, [*program, *TINY])
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {rival}: ") and word in result.output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("rival", RIVALS)
def test_another_program_is_measured(compare: ModuleType, rival: str) -> None:
    if variable(rival) not in os.environ:
        pytest.skip(f"{variable(rival)} names no Python that has {rival}")
    result = CliRunner().invoke(compare.main, ["--against", rival, *TINY, "--turns", "1"])
    assert result.exit_code == 0, result.output
    assert f"| {rival} " in result.output
    assert f"of {rival}: " in result.output and "of its CPU-seconds" in result.output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_case_is_measured(compare: ModuleType) -> None:
    cases = ["--answers", "1", "--answers", "0.5", "--turns", "1", "--warm", "0"]
    result = CliRunner().invoke(compare.main, [*TINY, *cases])
    assert result.exit_code == 0, result.output
    assert result.output.count("| headsmith working tree | float32") == 2
    assert "100% answers" in result.output and "50% answers" in result.output
    floors = [line for line in result.output.splitlines() if line.startswith("matrix products")]
    whole, half = (float(line.split(",")[1].split()[0]) for line in floors)
    assert half < 0.7 * whole, "prompt tokens cost less"
