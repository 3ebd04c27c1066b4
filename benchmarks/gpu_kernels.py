"""Every kernel against its reference on the device: `python benchmarks/gpu_kernels.py`.

A part of benchmarks/gpu.sh. Sizes are those of Llama-3.1-8B; with --dry they are tiny, and Triton's
interpreter stands in for the GPU. Float32 kernels must agree with the reference in float64 to
1e-4; bfloat16 ones must not be further from it than twice the reference in bfloat16 is; integers
must be equal. Exits with 1 where one is not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import torch
from gpu_cases import DRY, PARTS, REAL, Made, Run

from headsmith.cli import run
from headsmith.errors import EnvironmentFault, GateNotMet
from headsmith.files import write_json
from headsmith.inference.kernels import VARIABLE


def judge(go: Run, dtype: torch.dtype) -> tuple[float, float, bool]:
    """The kernel's error and the reference's, as shares of the truth's size, and the verdict."""
    found, plain, exact = go(True, dtype), go(False, dtype), go(False, torch.float64)
    worst, base, good = 0.0, 0.0, True
    for mine, its, truth in zip(found, plain, exact, strict=True):
        if not mine.is_floating_point():
            good &= bool(torch.equal(mine, its))
            continue
        size = float(truth.double().square().mean().sqrt()) or 1.0
        errors = [
            float((one.double() - truth.double()).square().mean().sqrt()) / size
            for one in (mine, its)
        ]
        worst, base = max(worst, errors[0]), max(base, errors[1])
        bound = 1e-4 if dtype == torch.float32 else 2 * errors[1] + 1e-4
        good &= bool(mine.isfinite().all()) and errors[0] <= bound
    return worst, base, good


@click.command()
@click.option("--dry", is_flag=True, help="Tiny sizes in Triton's interpreter, on the CPU.")
@click.option("--json", "path", type=Path, help="Write the figures here.")
def main(dry: bool, path: Path | None) -> None:
    """Check all kernels; print a line each."""
    if os.environ.get(VARIABLE) not in ("on", "auto"):
        raise EnvironmentFault(f"set {VARIABLE}=auto (with --dry: on, and TRITON_INTERPRET=1)")
    if not dry and not torch.cuda.is_available():
        raise EnvironmentFault("there is no GPU here; --dry goes through it all without one")
    made = Made(torch.device("cpu" if dry else "cuda"))
    if dry:
        from headsmith.inference.kernels.interpreter import exchange_once

        exchange_once()
    rows = []
    for part in PARTS:
        for name, go in part(made, DRY if dry else REAL):
            for dtype in (torch.float32, torch.bfloat16):
                error, plain, good = judge(go, dtype)
                kind = str(dtype).removeprefix("torch.")
                rows.append({"kernel": name, "dtype": kind, "good": good})
                rows[-1] |= {"error": error, "reference_error": plain}
                verdict = "ok" if good else "WRONG"
                click.echo(f"{name}, {kind}: {verdict}, {error:.1e} (reference {plain:.1e})")
    if path is not None:
        write_json(path, rows)
    wrong = sorted({str(row["kernel"]) for row in rows if not row["good"]})
    if wrong:
        raise GateNotMet(f"{', '.join(wrong)} are not what their references give")


if __name__ == "__main__":
    sys.exit(run(main, name="gpu_kernels.py"))
