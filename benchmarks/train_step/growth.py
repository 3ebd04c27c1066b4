"""How the cost of our training step grows with row length, draft vocabulary, steps of the unroll
and share of prompt tokens: `python benchmarks/train_step/growth.py`.

Each line is a process of its own; what a line does not name is as in the first table's caption.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import replace
from typing import Any

import click
from step_case import SMOLLM2, Case, make_data

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


def cost(case: Case, threads: int, times: int) -> dict[str, float]:
    """CPU-seconds a step, median, and the bytes that a fresh process grows by."""
    context = multiprocessing.get_context("forkserver")
    # Everything is imported once, in the process that the others are forked from.
    context.set_forkserver_preload(["step_headsmith"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(case, threads, times, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise click.ClickException(f"no figures for {case.text()}; it says why above") from None
    finally:
        process.join()


def _measure(case: Case, threads: int, times: int, answer: Any) -> None:
    """One line, in a process of its own."""
    import torch
    from step_headsmith import make_stepper
    from step_worker import reset_peak

    torch.set_num_threads(threads)
    stepper = make_stepper(make_data(case), "float32")
    grown, spent = reset_peak(), []
    for number in range(times + 1):
        begin = time.process_time()
        stepper.run(number)
        spent.append(time.process_time() - begin)
    answer.send({"seconds": statistics.median(spent[1:]), "grown": grown()})


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
            found = cost(case, threads, times)
            seconds, grown = found["seconds"], found["grown"]
            first = first or seconds
            print(f"| {value} | {seconds:.2f} | {seconds / first:.2f} | {grown / 2**20:.0f} |")


if __name__ == "__main__":
    main()
