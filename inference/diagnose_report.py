"""The drift of a head for people: a table, a CSV file and a plot of the same rows."""

from __future__ import annotations

import csv
import io
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headsmith.files import write_atomic, write_text
from headsmith.inference import plots
from headsmith.inference.report import open_table

NOTE = (
    "state: what the drafting row reads, the target's taps through fc at depth 1, then the head's "
    "own state; output: before any norm. Attention: sink is the first {sink} tokens, own the "
    "drafts. c: of the passes that came so far, those whose next draft was accepted"
)

COLUMNS = (
    "context",
    "depth",
    "state\nRMS",
    "output\nRMS",
    "attention:\nsink",
    "text",
    "own",
    "c",
    "passes\nso far",
)


def print_diagnosis(diagnosis: dict[str, Any], console: Console) -> None:
    """Prints the table of what was diagnosed."""
    drift = diagnosis["drift"]
    if not drift["rows"]:
        console.print(Text("drift: no pass drafted a whole chain, so there is nothing to show"))
        return
    title = f"drift over the head's own drafts, {drift['draft']}, by {drift['grouped_by']}"
    table = open_table(title, *COLUMNS)
    for context, rows in groupby(drift["rows"], lambda row: row["context"]):
        for number, row in enumerate(rows):
            table.add_row(
                "" if number else context,
                str(row["depth"]),
                f"{row['state_rms']:.2f}",
                f"{row['output_rms']:.2f}",
                *(f"{100 * row[f'attention_{part}']:.1f} %" for part in ("sink", "text", "own")),
                "-" if row["conditional"] is None else f"{100 * row['conditional']:.1f} %",
                str(row["reached"]),
            )
        table.add_section()
    console.print(table)
    console.print(Text(NOTE.format(sink=drift["sink_tokens"]), style="dim"))


def write_diagnosis(folder: Path, diagnosis: dict[str, Any]) -> None:
    """Writes drift.csv and, with matplotlib and rows to show, drift.png into `folder`."""
    rows = diagnosis["drift"]["rows"]
    write_text(folder / "drift.csv", drift_csv(rows))
    if rows and plots.can_plot():
        plot_drift(rows, folder / "drift.png")


def drift_csv(rows: list[dict[str, Any]]) -> str:
    """The rows as CSV with a header; an empty field where a figure has no value."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def plot_drift(rows: list[dict[str, Any]], path: Path) -> None:
    """Three panels over the depth: size of the state, shares of attention, c; a colour a context.

    Needs matplotlib (`pip install 'headsmith[report]'`); opens no window.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    sizes, attention, accepted = figure.subplots(1, 3)
    for number, (context, group) in enumerate(groupby(rows, lambda row: row["context"])):
        found = list(group)
        depths = [row["depth"] for row in found]
        look: dict[str, Any] = {"color": f"C{number}", "marker": "o", "markersize": 3}
        for panel, key, style, label in (
            (sizes, "state_rms", "-", f"{context} tokens"),
            (attention, "attention_sink", "-", f"{context}: sink"),
            (attention, "attention_text", ":", f"{context}: text"),
            (attention, "attention_own", "--", f"{context}: own drafts"),
            (accepted, "conditional", "-", f"{context} tokens"),
        ):
            values = [float("nan") if row[key] is None else row[key] for row in found]
            panel.plot(depths, values, style, label=label, **look)
    for panel, title in (
        (sizes, "RMS of the state that is read"),
        (attention, "share of attention"),
        (accepted, "c: next draft accepted"),
    ):
        panel.set_title(title)
        panel.set_xlabel("draft depth")
        panel.set_ylim(bottom=0, top=None if panel is sizes else 1)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
