"""What `headsmith tune` found: tables for people, and one plot."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from headsmith.inference.figures import bounds, number
from headsmith.inference.plots import side_by_side
from headsmith.inference.report import open_table

_CHAIN = re.compile(r"chain:(\d+)$")


def print_tune(found: dict[str, Any], console: Console) -> None:
    """Prints a row a draft, the advice of each batch size, and warnings."""
    batches = found["setup"]["batch"]
    columns = [f"speedup\nbatch {batch}" for batch in batches]
    table = open_table("drafts", "draft", "tau", "95 % interval", "nodes per\ntoken", *columns)
    for run in found["runs"]:
        speed = {row["batch"]: row["speedup"] for row in run["speed"]}
        cells = [number(run["tau"]), bounds(run["tau_ci"]), number(run["nodes_per_token"])]
        table.add_row(run["draft"], *cells, *(number(speed.get(batch)) for batch in batches))
    console.print(table)
    for line in advice(found):
        console.print(Text(line))
    for warning in found["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"))


def advice(found: dict[str, Any]) -> Iterable[str]:
    """What to serve, in sentences."""
    for row in found["best"]:
        if row["draft"] == "none":
            yield f"batch {row['batch']}: no draft pays; decode plainly"
            continue
        line = f"batch {row['batch']}: {row['draft']}, {row['speedup']:.2f} times plain decoding"
        if row["close"]:
            line += f"; no worse within the noise: {', '.join(row['close'])}"
        yield line
    limit = found["batch_limit"]
    if limit is None:
        yield "speculation does not pay at the smallest batch size; do not serve this head here"
    elif limit == max(found["setup"]["batch"]):
        yield f"speculation pays at every batch size measured, up to {limit}"
    else:
        yield f"speculation pays up to batch {limit}; switch it off above"
    for run in found["runs"]:
        if run["fails"]:
            yield f"{run['draft']}: {run['fails']} output tokens are NOT the target's own"


def draw_tune(found: dict[str, Any]) -> bytes:
    """Speedup against the batch size, a line a draft; tau against depth; tau against context."""
    runs = found["runs"]
    lengths = sorted({int(n) for run in runs for one in run["contexts"].values() for n in one})
    figure, panels = side_by_side(3 if lengths else 2)
    speedups, depths, *others = panels
    for run in runs:
        rows = [row for row in run["speed"] if row["speedup"] is not None]
        label = run["draft"]
        points = [row["batch"] for row in rows]
        speedups.plot(points, [row["speedup"] for row in rows], marker="o", label=label)
        for panel in others:
            for task, taus in run["contexts"].items():
                at = sorted(map(int, taus))
                values = [taus[str(n)] for n in at]
                panel.plot(at, values, marker="o", markersize=3, label=f"{label}, {task}")
    batches = found["setup"]["batch"]
    speedups.set_xscale("log", base=2)
    speedups.set_xticks(batches, [str(batch) for batch in batches])
    speedups.minorticks_off()
    speedups.axhline(1, color="grey", linewidth=1)
    _labels(speedups, "batch", "speed over plain decoding")
    chains = [(int(m[1]), run) for run in runs if (m := _CHAIN.match(run["draft"]))]
    trees = [run for run in runs if not _CHAIN.match(run["draft"])]
    depths.plot(
        [depth for depth, _ in sorted(chains, key=lambda one: one[0])],
        [run["tau"] for _, run in sorted(chains, key=lambda one: one[0])],
        marker="o",
        label="chains",
    )
    for run in trees:
        depths.axhline(run["tau"], linestyle="--", linewidth=1, label=run["draft"], color="grey")
    _labels(depths, "depth of the chain", "tau")
    for panel in others:
        _labels(panel, "prompt length in tokens", "tau")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()


def _labels(panel: Any, x: str, y: str) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="x-small")
