"""Training steps with and without kernels: `python benchmarks/gpu_train.py --target DIR`.

A part of benchmarks/gpu.sh: the quickstart's recipe for some steps, once for each wish for kernels,
in a process of its own each. Printed are tokens a second (median over the steps but the first few)
and how far the losses of the two runs are from each other. With --dry few and short rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click

from headsmith.cli import run
from headsmith.errors import GateNotMet, HeadsmithError
from headsmith.files import write_json
from headsmith.inference.kernels import VARIABLE

# Steps that are not counted: kernels compile, allocators grow.
FIRST = 5
WORDS = "one two three red green blue tea milk sun moon sea hill"
# Losses of bfloat16 runs drift apart step by step, those of float32 less.
NEAR = 0.05
REAL = (
    "data.max_rows=300",
    "data.max_length=1024",
    "data.row_tokens=4096",
    "data.keep_features=none",
    "train.tokens_per_step=4096",
    "train.unroll_steps=5",
    "train.unroll_growth=0",
    "train.precision=bfloat16",
    "train.max_steps=25",
    "train.epochs=50",
)
DRY = (
    "head.draft_vocab_size=40",
    "head.taps=[0,1,2]",
    "data.max_length=64",
    "data.row_tokens=64",
    "data.keep_features=none",
    "train.tokens_per_step=64",
    "train.unroll_steps=2",
    "train.unroll_growth=0",
    "train.max_steps=2",
    "train.epochs=2",
)
# The interpreter, made quicker, before anything runs in it.
IN_INTERPRETER = """
import sys
from headsmith.inference.kernels.interpreter import exchange_once
exchange_once()
from headsmith.cli import run
from headsmith.train.cli import train
sys.exit(run(train))
"""


def steps_of(target: str, wish: str, *, dry: bool) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    with tempfile.TemporaryDirectory() as folder:
        changes = list(DRY if dry else REAL)
        start = ["-m", "headsmith.train"]
        if dry:
            start = ["-c", IN_INTERPRETER]
            # Short, since a tiny tokenizer makes a token of each byte.
            said = (("user", "Hi"), ("assistant", WORDS))
            turns = [{"role": role, "content": text} for role, text in said]
            source = Path(folder) / "chat.jsonl"
            source.write_text((json.dumps({"messages": turns}) + "\n") * 2, encoding="utf-8")
            changes.append(f"data.source={source}")
        command = [sys.executable, *start, "quickstart/eagle3", *changes]
        command += [f"target.path={target}", f"output.dir={folder}/run", "validation.holdout=0"]
        environment = {**os.environ, VARIABLE: wish}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise HeadsmithError(f"training with kernels {wish} failed: {done.stderr[-600:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def row_of(wish: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed of a run."""
    counted = steps[FIRST:] or steps[-1:]
    return {
        "wish": wish,
        "steps": len(steps),
        "tokens_per_s": median(step["tokens"] / step["seconds"] for step in counted),
        "seconds_a_step": median(step["seconds"] for step in counted),
        "losses": [step["loss"] for step in steps],
    }


@click.command()
@click.option("--target", required=True, help="Folder or name of the trained target.")
@click.option("--kernels", "wishes", default="off,auto", show_default=True, help="Wishes, in turn.")
@click.option("--dry", is_flag=True, help="Few and short rows.")
@click.option("--json", "path", type=Path, help="Write the rows here.")
def main(target: str, wishes: str, dry: bool, path: Path | None) -> None:
    """Measure training; print a line each."""
    rows = []
    for wish in wishes.split(","):
        rows.append(row_of(wish, steps_of(target, wish, dry=dry)))
        row = rows[-1]
        click.echo(
            f"training, kernels {wish}: {row['tokens_per_s']:.0f} tokens/s, "
            f"{row['seconds_a_step']:.3f} s a step"
        )
    first, *others = [row["losses"] for row in rows]
    apart = max(
        (abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True)),
        default=0.0,
    )
    click.echo(f"losses of the runs differ by at most {apart:.2e} of themselves")
    if path is not None:
        write_json(path, {"rows": rows, "losses_apart": apart})
    if apart > NEAR:
        raise GateNotMet(f"losses with and without kernels differ by {apart:.3f} of themselves")


if __name__ == "__main__":
    sys.exit(run(main, name="gpu_train.py"))
