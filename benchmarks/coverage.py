"""Does the interval of tau hold what it promises? Sets of prompts resampled from a real run:

    python benchmarks/coverage.py runs/quickstart/eval/steps.jsonl

Each set is drawn with replacement from the run's conversations, as a new sample of its kind. The
share of the sets whose 95 percent interval holds the tau of the whole run is its coverage: between
90 and 98 percent of 200 sets, or the exit code is 1. With few conversations in the run, the whole
is a small world: take a run of 100 or more.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import click

from headsmith.inference.metrics import bootstrap_tau, summarise
from headsmith.inference.records import Steps

LOWEST, HIGHEST = 0.90, 0.98


def conversations(steps: list[Steps]) -> list[list[Steps]]:
    """The records of each conversation, turns together."""
    groups: dict[str, list[Steps]] = defaultdict(list)
    for one in steps:
        groups[one.conversation].append(one)
    return list(groups.values())


def resample(groups: list[list[Steps]], prompts: int, draw: random.Random) -> list[Steps]:
    """As many conversations, each draw a conversation of its own even where it came before."""
    return [
        # What stands before `#` names the conversation.
        replace(one, id=f"{number}#{turn}")
        for number, turns in enumerate(draw.choices(groups, k=prompts))
        for turn, one in enumerate(turns, start=1)
    ]


def coverage(steps: list[Steps], sets: int, prompts: int, seed: int) -> float:
    """Share of the sets whose interval holds the tau of all the steps."""
    whole = summarise(steps)["tau"]
    groups, draw, held = conversations(steps), random.Random(seed), 0
    for number in range(sets):
        interval = bootstrap_tau(resample(groups, prompts, draw), seed=number)
        held += bool(interval and whole and interval[0] <= whole <= interval[1])
    return held / sets


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--sets", default=200, show_default=True)
@click.option("--prompts", default=40, show_default=True, help="Conversations in a set.")
@click.option("--seed", default=0, show_default=True)
def main(path: Path, sets: int, prompts: int, seed: int) -> None:
    """Coverage of the interval of tau over sets resampled from a steps.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines()
    steps = [Steps.from_json(json.loads(line)) for line in lines]
    share = coverage(steps, sets, prompts, seed)
    print(
        f"{path}: tau {summarise(steps)['tau']:.3f} of {len(conversations(steps))} conversations; "
        f"{share:.1%} of {sets} sets of {prompts} hold it (95 % promised)"
    )
    if not LOWEST <= share <= HIGHEST:
        sys.exit(1)


if __name__ == "__main__":
    main()
