"""How the cost of our training step grows with row length, draft vocabulary, steps of the unroll and
share of prompt tokens: `python benchmarks/train_step/growth.py`.

Each line is a process of its own; what a line does not name is as in the first table's caption.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
from step_case import SMOLLM2, Case, make_data
from step_worker import Failed, Worker

SCRIPT = Path(__file__).parent / "step_headsmith.py"
# Row length in one document; then the other three at 1,024 tokens in four documents.
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
DRAFTED = (2048, 4096, 8192, 16384, 32768)
STEPS = (1, 2, 3, 5, 7)
PROMPTS = (0.0, 0.25, 0.5, 0.8, 0.9)


def cases() -> dict[str, list[tuple[str, Case]]]:
    """A table each: name of what grows, (value, case)."""
    return {
        "tokens in one document": [
            (f"{n:,}", replace(SMOLLM2, documents=1, length=n)) for n in LENGTHS
        ],
        "draft ids": [(f"{n:,}", replace(SMOLLM2, draft_vocab=n)) for n in DRAFTED],
        "steps of the unroll": [(f"{n}", replace(SMOLLM2, steps=n)) for n in STEPS],
        "prompt tokens": [(f"{n:.0%}", replace(SMOLLM2, answers=1 - n)) for n in PROMPTS],
    }


def cost(case: Case, threads: int, times: int) -> tuple[float, int]:
    """CPU-seconds a step, median, and the bytes that the process grows by."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.pt"
        import torch

        torch.save(make_data(case), data)
        settings = {"data": str(data), "threads": threads, "precision": "float32"}
        worker = Worker("headsmith", sys.executable, SCRIPT, settings, threads)
        steps = [worker.ask("step") for _ in range(times + 1)][1:]
        worker.close()
    return statistics.median(step["cpu"] for step in steps), steps[-1]["growth"]


@click.command()
@click.option("--only", default="", help="Only tables whose name contains this.")
@click.option("--threads", default=1, show_default=True)
@click.option("--times", default=5, show_default=True, help="Steps that count, of each line.")
def main(only: str, threads: int, times: int) -> None:
    """Measure and print the tables."""
    print(f"{SMOLLM2.text()}, float32, {threads} threads")
    for name, lines in cases().items():
        if only not in name:
            continue
        print(f"\n| {name} | CPU-s a step | of the first | MiB grown |\n|---|---|---|---|")
        first = None
        for value, case in lines:
            try:
                seconds, grown = cost(case, threads, times)
            except Failed as error:
                raise click.ClickException(str(error)) from None
            first = first or seconds
            print(f"| {value} | {seconds:.2f} | {seconds / first:.2f} | {grown / 2**20:.0f} |")


if __name__ == "__main__":
    main()
