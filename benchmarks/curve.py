"""Tau against training tokens, from what a training run wrote:
`python benchmarks/curve.py OUTPUT_DIR --plot curve.svg`.

A row for every checkpoint that was validated: tokens trained on until then (each epoch counts), the
time of its steps, what the verifier measured on conversations left out of training, and what the
trainer predicted from those in it, over all steps since the row before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click


@dataclass(frozen=True)
class Point:
    """A validated checkpoint; minutes are those of optimiser steps, without fit and validation."""

    step: int
    tokens: int
    minutes: float
    predicted: float
    tau: float
    interval: tuple[float, float]
    per_position: list[float]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of one of a run's logs; the last of each step, where it was continued."""
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return [line for _, line in sorted({line["step"]: line for line in lines}.items())]
    except (OSError, ValueError, KeyError) as error:
        raise click.ClickException(f"{path} is not a log of a training run: {error}") from None


def points(run: Path) -> list[Point]:
    """Every validated checkpoint of the run, in order."""
    steps = read_lines(run / "metrics.jsonl")
    found, before = [], 0
    for told in read_lines(run / "validation.jsonl"):
        until = [line for line in steps if line["step"] <= told["step"]]
        since = [line for line in until if line["step"] > before]
        if told["tau"] is None or not since:
            continue
        before = told["step"]
        found.append(
            Point(
                told["step"],
                sum(line["tokens"] for line in until),
                sum(line["seconds"] for line in until) / 60,
                sum(line["predicted_tau"] for line in since) / len(since),
                told["tau"],
                tuple(told["tau_ci"]),
                told["per_position"],
            )
        )
    if not found:
        raise click.ClickException(f"no checkpoint of {run} was validated")
    return found


def draw(found: list[Point], path: Path) -> None:
    """The curve as a picture; the kind of file follows from its name."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException(
            "the curve is drawn by matplotlib: pip install 'headsmith[report]'"
        ) from None

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.add_subplot()
    tokens = [point.tokens / 1e6 for point in found]
    low, high = zip(*(point.interval for point in found), strict=True)
    panel.fill_between(tokens, low, high, alpha=0.2, label="95 % interval")
    panel.plot(tokens, [point.tau for point in found], "o-", label="measured, left out of training")
    predicted = [point.predicted for point in found]
    panel.plot(tokens, predicted, "s--", label="predicted, in training")
    panel.set(xlabel="million training tokens", ylabel="tau", xlim=(0, None))
    panel.grid(alpha=0.3)
    panel.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture to draw.")
def main(run: Path, plot: Path | None) -> None:
    """Print a table, and draw the curve."""
    found = points(run)
    print("| step | tokens | minutes | tau (95 %) | u | predicted in training |")
    print("|---|---|---|---|---|---|")
    for point in found:
        low, high = point.interval
        rates = " ".join(f"{rate:.3f}".lstrip("0") for rate in point.per_position)
        print(
            f"| {point.step:,} | {point.tokens:,} | {point.minutes:.0f} "
            f"| {point.tau:.2f} ({low:.2f} .. {high:.2f}) | {rates} | {point.predicted:.2f} |"
        )
    if plot is not None:
        draw(found, plot)
        print(f"\n{plot}")


if __name__ == "__main__":
    main()
