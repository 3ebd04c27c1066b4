"""The tables of a report as text, for Markdown and HTML, and the same figures in full as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any, NamedTuple

from headsmith.inference.degenerate import KINDS
from headsmith.inference.figures import (
    LOAD_COLUMNS,
    bounds,
    gigabytes,
    load_rows,
    megabytes,
    number,
    percent,
    phase_cells,
    signed,
    speed_cells,
)
from headsmith.inference.report import TAU_FORMULA

# Answers that a table lists by name; result.json names all of them.
LISTED = 20


class Sheet(NamedTuple):
    """A table: rows of cells under columns, the first of which is a label, and what to know."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def sheets(result: dict[str, Any]) -> list[Sheet]:
    """Every table that the result has figures for."""
    found = [_acceptance(result), _positions(result), _speed(result["speed"])]
    found += [_load(result["speed"]), _memory(result["speed"]), _ends(result)]
    found += [_deciles(result.get("deciles")), _degenerate(result.get("degenerate"))]
    found += [_gate(result.get("gate"))]
    return [sheet for sheet in found if sheet.rows]


def acceptance_csv(result: dict[str, Any]) -> str:
    """A row a task, and `overall`: METRICS with u_1 .. and c_1 .. as columns of their own."""
    rows = []
    for name, metrics in [*result["tasks"].items(), ("overall", result["overall"])]:
        low, high = metrics["tau_ci"] or (None, None)
        row = {"task": name, "tau": metrics["tau"], "tau_low": low, "tau_high": high}
        lists = {"per_position": "u", "conditional": "c"}
        row |= {
            key: value
            for key, value in metrics.items()
            if isinstance(value, int | float | None) and key not in row and key != "tau_ci"
        }
        row |= {f"cut_by_{why}": count for why, count in metrics["truncated"].items()}
        for key, letter in lists.items():
            row |= {f"{letter}_{i}": rate for i, rate in enumerate(metrics[key], start=1)}
        row |= {f"accepted_{i}": count for i, count in enumerate(metrics["histogram"])}
        rows.append(row)
    return to_csv(rows)


def speed_csv(result: dict[str, Any]) -> str:
    """A row a batch size; percentiles as columns of their own."""
    rows = []
    for given in result["speed"]:
        row: dict[str, Any] = {}
        for key, value in given.items():
            if key == "load":
                row |= _flat("load", value)
            elif isinstance(value, dict):
                row |= {f"{key}_{part}": one for part, one in value.items()}
            elif key == "tau_ci":
                row["tau_low"], row["tau_high"] = value or (None, None)
            else:
                row[key] = value
        rows.append(row)
    return to_csv(rows)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Nested figures under the names of all their levels."""
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, one in value.items() for k, v in _flat(f"{name}_{key}", one).items()}


def to_csv(rows: list[dict[str, Any]]) -> str:
    """Rows under all their keys; an empty field where a figure has no value."""
    text = io.StringIO()
    keys = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(text, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _named(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The tasks and, where they are several, what they are together, so called."""
    tasks = list(result["tasks"].items())
    return [*tasks, ("all (pooled)", result["overall"])] if len(tasks) > 1 else tasks


def _acceptance(result: dict[str, Any]) -> Sheet:
    columns = ["task", "requests", "tokens", "passes", "tau", "95 % interval", "tau per request"]
    columns += ["accepted of the drafts", "nothing accepted", "nodes per token"]
    rows = [
        [
            name,
            *(str(metrics[key]) for key in ("requests", "tokens", "passes")),
            number(metrics["tau"]),
            bounds(metrics["tau_ci"]),
            number(metrics["tau_macro"]),
            percent(metrics["acceptance_rate"]),
            percent(metrics["zero_accept_fraction"]),
            number(metrics["nodes_per_token"]),
        ]
        for name, metrics in _named(result)
    ]
    return Sheet("Acceptance", columns, rows, TAU_FORMULA)


def _positions(result: dict[str, Any]) -> Sheet:
    depth = len(result["overall"]["per_position"])
    columns = ["task", "rate", *(str(place) for place in range(1, depth + 1))]
    rows = [
        [name, letter, *(percent(rate) for rate in _padded(metrics[key], depth))]
        for name, metrics in _named(result)
        for letter, key in (("u", "per_position"), ("c", "conditional"))
        if metrics[key]
    ]
    note = "u: of all passes, those that accepted this draft; c: of the passes that came so far"
    return Sheet("Accepted at draft position", columns, rows, note)


def _padded(rates: list[Any], depth: int) -> list[Any]:
    return [*rates, *[None] * (depth - len(rates))]


def _speed(given: Iterable[dict[str, Any]]) -> Sheet:
    columns = ["batch", "plain tok/s", "drafted tok/s", "speedup", "predicted", "pays", "tau"]
    columns += ["draft ms", "verify ms", "rest ms", "first token ms p50", "between tokens ms p50"]
    columns += ["peak GB"]
    rows = [
        [
            *speed_cells(row),
            number(row.get("tau")),
            *phase_cells(row),
            *(number(row[key]["p50"], 1) for key in ("ttft_ms", "itl_ms")),
            gigabytes(row["peak_memory_bytes"]),
        ]
        for row in given
    ]
    note = "tokens per second of decoding, prefill apart; draft, verify and rest in ms per pass"
    return Sheet("Speed", columns, rows, note)


def _load(given: list[dict[str, Any]]) -> Sheet:
    columns = [
        "concurrent",
        *(one.replace("-\n", "").replace("\n", " ") for one in LOAD_COLUMNS),
    ]
    note = (
        "all output over the whole run, prefill and waiting included; first: from a request's "
        "arrival to its first token; between: between tokens, shared by the tokens of a commit"
    )
    return Sheet("Load", columns, load_rows(given), note)


def _memory(given: list[dict[str, Any]]) -> Sheet:
    names = ("target", "cache", "head", "head_cache", "workspace")
    rows = [
        [str(row["batch"]), *(megabytes(row["load"]["memory"][name]) for name in names)]
        for row in given
        if row.get("load")
    ]
    columns = ["concurrent", "target", "cache", "head", "head's cache", "workspace"]
    return Sheet(
        "Memory at the peak in MB", columns, rows, "workspace: what measuring took besides"
    )


def _ends(result: dict[str, Any]) -> Sheet:
    reasons = ("eos", "stop", "length")
    rows = [
        [name, *(str(metrics["truncated"][reason]) for reason in reasons)]
        for name, metrics in _named(result)
        if any(metrics["truncated"].values())
    ]
    return Sheet("Passes cut short", ["task", "by EOS", "by a stop text", "by a limit"], rows)


def _deciles(given: list[dict[str, Any]] | None) -> Sheet:
    columns = ["task", "turn", "requests in a tenth", "first tenth", "last tenth", "difference"]
    rows = [
        [
            row["task"],
            str(row["turn"]),
            str(row["requests"]),
            number(row["first_tau"]),
            number(row["last_tau"]),
            signed(row["difference"]),
            bounds(row["difference_ci"]),
        ]
        for row in given or ()
    ]
    note = "a difference whose interval lies below 0 is decay, or prompts that grow harder"
    return Sheet("Tau at the begin and the end", [*columns, "95 % interval"], rows, note)


def _degenerate(given: dict[str, Any] | None) -> Sheet:
    which = given["which"] if given else []
    rows = [[one["id"], one["task"], one["kind"].replace("_", " ")] for one in which[:LISTED]]
    note = "; ".join(KINDS.values())
    if len(which) > LISTED:
        note += f"; {len(which) - LISTED} more are named in result.json"
    return Sheet("Degenerate answers", ["request", "task", "kind"], rows, note)


def _gate(given: list[dict[str, Any]] | None) -> Sheet:
    rows = [["met" if row["met"] else "MISSED", row["says"]] for row in given or ()]
    return Sheet("Gate", ["", "bound"], rows)
