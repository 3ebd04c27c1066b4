"""Compiling ahead of time: occupancy by hand, and that a sample of kernels spills nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.kernels.aot import Specimen, available, collect, compile_for, occupancy


@pytest.mark.parametrize(
    ("architecture", "warps", "registers", "shared", "columns", "expected"),
    [
        (80, 4, 32, 0, 0, 1.0),
        # 255 registers are 8192 a warp: two warps in each of four parts.
        (80, 4, 255, 0, 0, 8 / 64),
        (90, 8, 128, 0, 0, 16 / 64),
        # 33 registers take room for 40: twelve warps a part.
        (90, 4, 33, 0, 0, 48 / 64),
        # Two blocks of 100 KiB (and 1 KiB each) in 228 KiB, one in 164 KiB.
        (90, 4, 32, 100 * 1024, 0, 8 / 64),
        (80, 4, 32, 100 * 1024, 0, 4 / 64),
        (80, 16, 32, 164 * 1024, 0, 0.0),
        (90, 1, 32, 0, 0, 32 / 64),
        (100, 4, 32, 0, 256, 8 / 64),
        (90, 4, 32, 0, 256, 1.0),
    ],
)
def test_occupancy(
    architecture: int, warps: int, registers: int, shared: int, columns: int, expected: float
) -> None:
    assert occupancy(architecture, warps, registers, shared, columns) == expected


def test_specimens_name_every_argument_of_their_kernels() -> None:
    names = []
    for specimen in collect():
        arguments = set(specimen.kernel.arg_names)
        assert arguments == specimen.signature.keys() | specimen.constexprs.keys(), specimen.name
        assert not specimen.signature.keys() & specimen.constexprs.keys()
        names.append(specimen.name)
    assert len(set(names)) == len(names)
    assert {name.partition(".")[0] for name in names} == {
        "compaction",
        "head_input",
        "lm_head",
        "tree_attention",
    }


def test_in_the_interpreter_nothing_is_compiled() -> None:
    assert not available()
    with pytest.raises(HeadsmithError, match="unset TRITON_INTERPRET"):
        compile_for(Specimen("none", None, {}, {}, 4, 3), 90)


# The kernel that fills the registers most, on two architectures that multiply differently.
SAMPLE = [("compaction", "80"), ("tree_attention.tree", "90"), ("tree_attention.tree", "100")]


@pytest.mark.slow
@pytest.mark.parametrize(("only", "architecture"), SAMPLE)
def test_a_sample_compiles_without_spills(only: str, architecture: str, root: Path) -> None:
    """benchmarks/kernels.py exits 1 at a spill; all kernels and architectures take minutes."""
    command = [sys.executable, "benchmarks/kernels.py", "--only", only, "--arch", architecture]
    done = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"sm_{architecture}" in lines[0]
    assert len(lines) > 2 and all(only in line and "%" in line for line in lines[2:])
