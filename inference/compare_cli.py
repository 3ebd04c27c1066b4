"""`headsmith compare`: parse, call `compare`, print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

FORMULA = (
    "difference = tau of the run less tau of the reference over the same requests; interval: "
    "95 %, conversations drawn for both at once"
)


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="REFERENCE RUN...")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap.")
@click.option("--json", "json_path", help="Also write the comparison here; - is standard output.")
def compare_(runs: tuple[str, ...], seed: int, json_path: str | None) -> None:
    """Compare measured runs on the same prompts: the difference of tau, with its interval.

    A run is a folder that `headsmith eval --out` wrote, or a result.json with its steps.jsonl
    beside it. Every run is compared with the first. Runs with other settings, prompts or target are
    refused.
    """
    from rich.console import Console

    from headsmith.files import write_json
    from headsmith.inference.compare import compare

    found = compare(runs, seed=seed)
    print_comparison(found, Console(stderr=json_path == "-"))
    if json_path == "-":
        click.echo(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
    elif json_path is not None:
        write_json(json_path, found)


def print_comparison(found: dict[str, Any], console: Console) -> None:
    """Prints a table for each run that was compared, and what to know of it."""
    from rich.text import Text

    from headsmith.inference.figures import bounds, number, signed
    from headsmith.inference.report import open_table

    for one in found["comparisons"]:
        columns = ("task", "conver-\nsations", "tau of\nreference", "tau", "differ-\nence")
        title = f"{one['other']} against {one['reference']}"
        table = open_table(title, *columns, "95 % interval", "the run is")
        rows = list(one["tasks"].items())
        if len(rows) > 1:
            rows.append(("all", one["overall"]))
        for name, row in rows:
            table.add_row(
                name,
                str(row["conversations"]),
                number(row["reference_tau"]),
                number(row["tau"]),
                signed(row["difference"]),
                bounds(row["difference_ci"]),
                row["verdict"],
                style="bold" if name == "all" else None,
            )
        console.print(table)
        for note in one["notes"]:
            console.print(Text(f"note: {note}", style="yellow"))
        console.print(Text(_advice(one["overall"])))
    console.print(Text(FORMULA, style="dim"))


def _advice(overall: dict[str, Any]) -> str:
    """What the overall row says, in a sentence."""
    from headsmith.inference.advice import FEWEST

    if overall["verdict"] == "too few":
        return (
            f"{overall['conversations']} conversations are too few to tell the runs apart; take "
            f"{FEWEST} or more, and 80 or more for small differences"
        )
    if overall["verdict"] != "undecided":
        return f"over all tasks the run's tau is {overall['verdict']} than the reference's"
    more = overall["more_to_tell_apart"]
    if more is None:
        return "over all tasks the runs cannot be told apart, and no practical number would do"
    return (
        "over all tasks the runs cannot be told apart; if the difference is as it looks, about "
        f"{more} more prompts would"
    )
