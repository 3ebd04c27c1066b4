"""The report of a run as files: summary.md, CSV, PNG plots and one HTML page that needs no other.

    summary.md       the tables and what they say, for a pull request or a model card
    acceptance.csv   every acceptance figure, a row a task; speed.csv: a row a batch size
    *.png            see `plots`
    report.html      all of it, plots inlined; opens without network

Everything in them is in result.json, so that a report can be made of a result again.
"""

from __future__ import annotations

import base64
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from headsmith.files import write_atomic, write_text
from headsmith.inference import plots
from headsmith.inference.plots import Plot, draw_all
from headsmith.inference.report import statements, title_of
from headsmith.inference.sheets import Sheet, acceptance_csv, sheets, speed_csv

TEMPLATE = "page.html.j2"


def write_report(folder: Path, result: dict[str, Any]) -> None:
    """Writes the report of a result into `folder`; without matplotlib, without its plots."""
    drawn = draw_all(result) if plots.can_plot() else []
    tables = sheets(result)
    write_text(folder / "acceptance.csv", acceptance_csv(result))
    write_text(folder / "speed.csv", speed_csv(result))
    for plot in drawn:
        write_atomic(folder / plot.file, _writing(plot.png))
    write_text(folder / "summary.md", summary(result, tables, drawn))
    write_text(folder / "report.html", page(result, tables, drawn))


def drop_stale_plots(folder: Path, written: set[str]) -> None:
    """Removes plots that an earlier run left in `folder`, for axes that this one does not have."""
    for file in plots.FILES - written:
        (folder / file).unlink(missing_ok=True)


def summary(result: dict[str, Any], tables: list[Sheet], drawn: list[Plot]) -> str:
    """The report as Markdown, with links to the plots beside it."""
    parts = [f"# {title_of(result)}"]
    parts.append("\n".join(f"- {line}" for line in statements(result)))
    if result["warnings"]:
        warnings = "\n".join(f"- {line}" for line in result["warnings"])
        parts.append(f"## Warnings\n\n{warnings}")
    parts += [f"## {sheet.title}\n\n{_markdown(sheet)}" for sheet in tables]
    parts += [f"![{plot.caption}]({plot.file})" for plot in drawn]
    parts.append("## How it was measured\n\n" + _markdown(_provenance(result)))
    return "\n\n".join(parts) + "\n"


def page(result: dict[str, Any], tables: list[Sheet], drawn: list[Plot]) -> str:
    """The report as one HTML page that refers to nothing outside itself."""
    from jinja2 import Environment

    template = files("headsmith.inference").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    inlined = [
        {
            "caption": one.caption,
            "uri": f"data:image/png;base64,{base64.b64encode(one.png).decode()}",
            "wide": one.wide,
        }
        for one in drawn
    ]
    return environment.from_string(template).render(
        title=title_of(result),
        headline=_headline(result),
        statements=statements(result),
        warnings=result["warnings"],
        plots=inlined,
        no_plot="" if plots.can_plot() else plots.NO_PLOT,
        sheets=[*tables, _provenance(result)],
        created=result["created"],
    )


def _headline(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figures that are read first: label, value, what belongs to it."""
    overall, equality, first = result["overall"], result["equality"], result["speed"][0]
    tiles = []
    if overall["tau"] is not None:
        low_high = overall["tau_ci"]
        span = f"95 %: {low_high[0]:.2f} .. {low_high[1]:.2f}" if low_high else "no interval"
        tasks = len(result["tasks"])
        tiles.append(("tau", f"{overall['tau']:.2f}", f"{span}; tasks: {tasks}, pooled here"))
        if tasks == 1:
            tiles[-1] = ("tau", f"{overall['tau']:.2f}", span)
    if first["speedup"] is not None:
        plain = f"over plain decoding, batch {first['batch']}"
        tiles.append(("speedup", f"{first['speedup']:.2f} x", plain))
    if equality:
        kept = "every token is the target's own" if not equality["fails"] else "NOT the target's"
        tiles.append(("equality", f"{equality['fails']} fails", kept))
    elif result["lossy"]:
        tiles.append(("output", "lossy", f"rule {result['lossy']['rule']}"))
    return tiles


def _provenance(result: dict[str, Any]) -> Sheet:
    """Without these no figure can be compared with another (spec/verifier.md 1.3)."""
    rows = [["command", result["command"]], ["created", result["created"]]]
    for part in ("target", "head", "setup", "device", "versions"):
        for name, value in (result[part] or {}).items():
            if value not in (None, "", []):
                text = value if isinstance(value, str) else json.dumps(value)
                rows.append([f"{part}: {name}", text])
    return Sheet("How it was measured", ["", "value"], rows)


def _markdown(sheet: Sheet) -> str:
    """The table; its text columns, of which the first is one, to the left."""
    ruler = [":---"] + ["---:"] * (len(sheet.columns) - 1)
    lines = [sheet.columns, ruler, *sheet.rows]
    text = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
    return f"{text}\n\n{sheet.note}" if sheet.note else text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _writing(data: bytes) -> Any:
    return lambda temporary: temporary.write_bytes(data)
