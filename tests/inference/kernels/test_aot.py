"""Compiling ahead of time: occupancy by hand, and that no kernel spills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.kernels.aot import (
    ARCHITECTURES,
    Specimen,
    available,
    collect,
    compile_for,
    occupancy,
)


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
    modules = {name.partition(".")[0] for name in names}
    assert {"compaction", "head_input", "lm_head", "tree_attention"} <= modules


def test_in_the_interpreter_nothing_is_compiled() -> None:
    assert not available()
    with pytest.raises(HeadsmithError, match="unset TRITON_INTERPRET"):
        compile_for(Specimen("none", None, {}, {}, 4, 3), 90)


def compiling(command: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where Triton compiles and does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


BARRIERS = """
import importlib.util, sys
from headsmith.inference.kernels.aot import build
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(build(module.specimens()[-1], 90).asm["ptx"].count("bar.sync"))
"""


@pytest.mark.slow
def test_compaction_waits_between_reading_and_writing(root: Path, tmp_path: Path) -> None:
    """The interpreter cannot show a race between threads, but the compiled code shows the barrier,
    and that it is gone without the kernel's own.
    """
    right = root / "inference" / "kernels" / "compaction_triton.py"
    source = right.read_text(encoding="utf-8")
    assert source.count("    tl.debug_barrier()\n") == 1
    wrong = tmp_path / "wrong.py"
    wrong.write_text(source.replace("    tl.debug_barrier()\n", ""), encoding="utf-8")
    done = compiling(["-c", BARRIERS, str(right), str(wrong)], root)
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile_without_spills(architecture: int, root: Path) -> None:
    """benchmarks/kernels.py exits 1 at a spill, and where a block does not fit."""
    done = compiling(["benchmarks/kernels.py", "--arch", str(architecture)], root)
    assert done.returncode == 0, done.stderr
    head, _, *lines = done.stdout.splitlines()
    assert f"sm_{architecture}" in head
    for room in ("tree_attention", "tree_build", "verify", "lm_head", "unroll_attention", "distil"):
        mine = [line for line in lines if line.startswith(f"| {room}")]
        assert mine and all("%" in line for line in mine)
