"""Our training step against that of another program, on the same shape, data and thread, in turn:

    python benchmarks/train_step/compare.py --against speculators --python ENV/bin/python \\
        --answers 1 --answers 0.75 --lm-head trained --lm-head frozen
    python benchmarks/train_step/compare.py --against specforge --shape small --answers 0.75 \\
        --precision fastest

The other program lives in an environment of its own, whose Python `--python` or the variable
HEADSMITH_SPECULATORS_PYTHON or HEADSMITH_SPECFORGE_PYTHON names; `--against none` leaves it out. A
step is everything from zeroed gradients to moved weights, with gradients clipped, on states that
lie in memory. CPU-seconds judge: they leave out what other jobs of the machine take. Memory is how
far a process grows at its peak beyond model and data. The last lines say how fast the same matrix
products are by themselves, as plain torch.matmul in the same turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from step_case import SHAPES, Case, make_data
from step_worker import Failed, Worker

HERE = Path(__file__).parent
RIVALS = ("speculators", "specforge")
PRECISIONS = ("float32", "bfloat16")
HEADS = ("trained", "frozen")


class Program:
    """A program that is measured, and what each step of the present case took."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        self.name = name
        self.worker = Worker(name, python, HERE / f"step_{name}.py", threads)
        self.settings, self.tried = "", ""
        self.steps: list[dict[str, Any]] = []

    def begin(self, settings: dict[str, Any], precision: str) -> None:
        """A case; `fastest` tries each precision first."""
        self.tried, self.steps = "", []
        if precision == "fastest":
            found = {one: self._try(settings | {"precision": one}) for one in PRECISIONS}
            precision = min(found, key=lambda one: found[one])
            self.tried = ", ".join(f"{one} {spent:.2f}" for one, spent in found.items())
        self.settings = self.worker.begin(settings | {"precision": precision})

    def _try(self, settings: dict[str, Any]) -> float:
        """CPU-seconds of the second step."""
        self.worker.begin(settings)
        self.worker.ask("step")
        spent = self.worker.ask("step")["cpu"]
        self.worker.ask("end")
        return spent

    def median(self, what: str) -> float:
        return statistics.median(step[what] for step in self.steps)

    def line(self, tokens: int) -> str:
        """A row of the table."""
        cpu = [step["cpu"] for step in self.steps]
        cells = [
            f"{self.name} {self.worker.about['version']}",
            self.settings,
            f"{self.median('cpu'):.3f} ({min(cpu):.3f} .. {max(cpu):.3f})",
            f"{self.median('wall'):.3f}",
            f"{tokens / self.median('cpu'):.0f}",
            f"{self.steps[-1]['growth'] / 2**20:.0f}",
            f"{self.median('faults') / 1e3:.0f}",
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| program | setting | CPU-s a step (least .. most) | wall s | tokens per CPU-s | MiB grown "
    "| 1000 page faults |\n" + "|---" * 7 + "|"
)


def measure(programs: list[Program], turns: int, warm: int) -> list[dict[str, Any]]:
    """Steps in turn; the first program's floor too. Returns the floors."""
    floors = []
    for turn in range(warm + turns):
        for program in programs:
            told = program.worker.ask("step")
            if turn >= warm:
                program.steps.append(told)
        if turn >= warm or turn == 0:
            floor = programs[0].worker.ask("floor")
            floors += [floor] if turn >= warm else []
    return floors


def report(case: Case, programs: list[Program], floors: list[dict[str, Any]]) -> None:
    """Print the table and what follows from it."""
    print(HEAD)
    for program in programs:
        print(program.line(case.tokens))
    print()
    ours, *others = programs
    for program in programs:
        if program.tried:
            print(f"{program.name} in each precision, CPU-s of one step: {program.tried}")
    for other in others:
        cpu, grown = (
            ours.median("cpu") / other.median("cpu"),
            ours.steps[-1]["growth"] / other.steps[-1]["growth"],
        )
        print(f"of {other.name}: {cpu:.2f} of its CPU-seconds, {grown:.2f} of its memory growth")
    floor = statistics.median(f["floor"] for f in floors)
    flop, step = floors[0]["flop"], ours.median("cpu")
    print(
        f"matrix products of our step: {floors[0]['products']}, {flop / 1e9:.1f} GFLOP; "
        f"torch.matmul alone {floor:.3f} s ({flop / floor / 1e9:.1f} GFLOP/s), in our step "
        f"{flop / step / 1e9:.1f} GFLOP/s of its whole time: {floor / step:.0%}"
    )


def python_of(rival: str, given: str | None) -> str:
    """The rival's Python; a usage error when nobody says where it is."""
    variable = f"HEADSMITH_{rival.upper()}_PYTHON"
    found = given or os.environ.get(variable)
    if not found:
        raise click.UsageError(
            f"{rival} needs an environment of its own: give its Python with --python or {variable} "
            "(docs/training-speed.md says what to install), or say --against none"
        )
    return found


@click.command()
@click.option("--against", type=click.Choice((*RIVALS, "none")), default="none", show_default=True)
@click.option("--python", help="Python of the other program's environment.")
@click.option("--shape", type=click.Choice(tuple(SHAPES)), default="smollm2", show_default=True)
@click.option(
    "--answers", multiple=True, type=float, default=[1.0], help="Share of tokens that are trained."
)
@click.option("--documents", type=int, help="Documents in the row.")
@click.option("--length", type=int, help="Tokens of each.")
@click.option("--draft-vocab", type=int, help="Ids that can be drafted.")
@click.option("--steps", type=int, help="Steps of the unroll.")
@click.option("--lm-head", multiple=True, type=click.Choice(HEADS), default=["trained"])
@click.option("--precision", type=click.Choice((*PRECISIONS, "fastest")), default="float32")
@click.option(
    "--optimiser", type=click.Choice(("adamw", "own")), default="adamw", help="speculators' own."
)
@click.option("--turns", default=7, show_default=True)
@click.option("--warm", default=2, show_default=True, help="Turns that do not count.")
@click.option("--threads", default=1, show_default=True)
@click.option("--stages", is_flag=True, help="Also where our time goes.")
def main(
    against: str,
    python: str | None,
    shape: str,
    answers: tuple[float, ...],
    lm_head: tuple[str, ...],
    precision: str,
    optimiser: str,
    turns: int,
    warm: int,
    threads: int,
    stages: bool,
    **sizes: int | None,
) -> None:
    """Measure and print a table for every case: every --answers with every --lm-head."""
    known = {key: value for key, value in sizes.items() if value is not None}
    base = replace(SHAPES[shape], **known)
    other = None if against == "none" else python_of(against, python)
    try:
        programs = [Program("headsmith", sys.executable, threads)]
        if other is not None:
            programs.append(Program(against, other, threads))
        for share, head in product(answers, lm_head):
            case = replace(base, answers=share, lm_head=head == "trained")
            print(f"\n{case.text()}, {threads} threads, {turns} turns\n", flush=True)
            run(
                case, programs, {"threads": threads, "optimiser": optimiser}, precision, turns, warm
            )
            if stages:
                print(f"\n{programs[0].worker.ask('stages')['table']}")
            for program in programs:
                program.worker.ask("end")
    except Failed as error:
        raise click.ClickException(str(error)) from None


def run(
    case: Case,
    programs: list[Program],
    settings: dict[str, Any],
    precision: str,
    turns: int,
    warm: int,
) -> None:
    """Measure one case and print what came out; the programs are left running."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.pt"
        torch.save(make_data(case), data)
        for program in programs:
            program.begin(settings | {"data": str(data)}, precision)
    report(case, programs, measure(programs, turns, warm))


if __name__ == "__main__":
    main()
