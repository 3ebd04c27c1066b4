"""Figures as text: one way of writing each kind, a dash where there is none."""

from __future__ import annotations

from typing import Any


def number(value: float | None, digits: int = 2) -> str:
    """`2.31`"""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """`81.5 %`"""
    return "-" if value is None else f"{100 * value:.1f} %"


def bounds(interval: list[float] | None) -> str:
    """`2.10 .. 2.52`"""
    return "-" if interval is None else f"{interval[0]:.2f} .. {interval[1]:.2f}"


def signed(value: float | None) -> str:
    """`+0.12`"""
    return "-" if value is None else f"{value:+.2f}"


def speed_cells(row: dict[str, Any]) -> list[str]:
    """Of a row of `speed`: batch size, plain and drafted tokens/s, speedup, prediction, verdict."""
    return [
        str(row["batch"]),
        number(row["baseline_tokens_per_s"], 1),
        number(row["tokens_per_s"], 1),
        number(row["speedup"]),
        number(row["predicted_speedup"]),
        {True: "yes", False: "no", None: "-"}[row["pays"]],
    ]


def phase_cells(row: dict[str, Any]) -> list[str]:
    """Of the same: ms a pass of draft, verify and the rest."""
    return [number(row[key]) for key in ("draft_ms", "verify_ms", "other_ms")]


LOAD_COLUMNS = (
    "tok/s",
    "run-\nning",
    "queue\nms",
    "first\nms p50",
    "p95",
    "p99",
    "between\nms p50",
    "p95",
    "p99",
)


def load_rows(speed: list[dict[str, Any]]) -> list[list[str]]:
    """Of the rows of `speed` with a `load`: batch and decoder, then FLOW under `LOAD_COLUMNS`."""
    rows = []
    for row in speed:
        for who in ("plain", "drafted"):
            flow = (row.get("load") or {}).get(who)
            if flow:
                waits = [
                    flow[key][p] for key in ("ttft_ms", "itl_ms") for p in ("p50", "p95", "p99")
                ]
                cells = [number(flow["output_tokens_per_s"], 1), number(flow["running"], 1)]
                cells += [number(ms, 0) for ms in (flow["queue_ms"]["p50"], *waits)]
                rows.append([f"{row['batch']} {who}", *cells])
    return rows


def megabytes(value: int | None) -> str:
    """`512.0`"""
    return "-" if value is None else f"{value / 1e6:.1f}"


def gigabytes(value: int | None) -> str:
    """`1.50`"""
    return "-" if value is None else f"{value / 1e9:.2f}"
