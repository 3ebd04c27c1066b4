"""The plots of a result, as PNG: each one where the run has its axis.

    positions.png   u and c of every draft position, a panel a task
    histogram.png   passes by accepted drafts, a panel a task
    depth.png       tau if drafts had stopped earlier: 1 + u_1 + .. + u_d (spec/verifier.md 1.1)
    context.png     tau against the prompt's length, where several were measured
    batch.png       tau against the batch size, where several were measured
    load.png        ms between tokens against output, under an arrival pattern
    speedup.png     measured and predicted speedup against the batch size

Needs matplotlib (`pip install 'headsmith[report]'`); opens no window. No panel pools tasks unless
it says so.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_PLOT = (
    "no plots are drawn, since matplotlib is not installed; run: "
    "pip install 'headsmith[report]', then headsmith report DIR"
)
POOLED = "all tasks, pooled"
MOST_PANELS = 12
_COLUMNS = 3


class Plot(NamedTuple):
    """A drawn plot: its file, what it shows in a sentence, and the PNG; `wide` with many panels."""

    file: str
    caption: str
    png: bytes
    wide: bool


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_all(result: dict[str, Any]) -> list[Plot]:
    """Every plot whose axis the run has, in the order in which they are read."""
    drawn = []
    for file, caption, draw in _PLOTS:
        figure = draw(result)
        if figure is not None:
            stream = io.BytesIO()
            figure.savefig(stream, format="png", dpi=110)
            drawn.append(Plot(file, caption, stream.getvalue(), len(figure.axes) > 1))
    return drawn


def contexts(result: dict[str, Any]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Task -> (length, METRICS), by length: the tasks `TASK@LENGTH` of a run with --context."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    if len(result["setup"].get("context") or ()) < 2:
        return found
    for name, metrics in result["tasks"].items():
        task, _, length = name.rpartition("@")
        if metrics["tau"] is not None:
            found.setdefault(task, []).append((int(length), metrics))
    return {task: sorted(points, key=lambda point: point[0]) for task, points in found.items()}


def _positions(result: dict[str, Any]) -> Figure | None:
    def bars(panel: Axes, metrics: dict[str, Any]) -> None:
        u = metrics["per_position"]
        c = [float("nan") if rate is None else rate for rate in metrics["conditional"]]
        places = range(1, len(u) + 1)
        panel.bar([place - 0.2 for place in places], u, 0.4, label="u: of all passes")
        panel.bar([place + 0.2 for place in places], c, 0.4, label="c: of those that came so far")
        panel.set_ylim(0, 1)
        panel.set_xticks(list(places))
        panel.set_xlabel("draft position")

    return _panels(result, bars, "share accepted")


def _histogram(result: dict[str, Any]) -> Figure | None:
    def bars(panel: Axes, metrics: dict[str, Any]) -> None:
        counts = metrics["histogram"]
        shares = [100 * count / metrics["passes"] for count in counts]
        panel.bar(range(len(counts)), shares, 0.8, label="passes")
        panel.set_xticks(list(range(len(counts))))
        panel.set_xlabel("drafts accepted in a pass")

    return _panels(result, bars, "% of passes")


def _depth(result: dict[str, Any]) -> Figure | None:
    shown = _tasks(result)
    if not shown:
        return None
    figure, panel = _single("draft depth", "tau")
    for name, metrics in shown:
        taus = [1.0]
        for rate in metrics["per_position"]:
            taus.append(taus[-1] + rate)
        look = {"color": "black", "linewidth": 2} if name == POOLED else {"linewidth": 1.2}
        panel.plot(range(len(taus)), taus, marker="o", markersize=3, label=name, **look)
    panel.set_xticks(list(range(1 + max(len(m["per_position"]) for _, m in shown))))
    panel.legend(fontsize="small")
    return figure


def _context(result: dict[str, Any]) -> Figure | None:
    found = contexts(result)
    if not found:
        return None
    figure, panel = _single("prompt length in tokens", "tau")
    for task, points in found.items():
        lengths = [length for length, _ in points]
        _with_bars(panel, lengths, [metrics for _, metrics in points], task)
    panel.legend(fontsize="small")
    return figure


def _batch(result: dict[str, Any]) -> Figure | None:
    rows = [row for row in result["speed"] if row.get("tau") is not None]
    if len(rows) < 2 or not result["overall"]["per_position"]:
        return None
    figure, panel = _single("batch", "tau")
    _with_bars(panel, [row["batch"] for row in rows], rows, POOLED)
    _batch_axis(panel, rows)
    return figure


def _latency(result: dict[str, Any]) -> Figure | None:
    """Waiting against output, a point a concurrency: where the curve bends, the machine is full."""
    rows = [row for row in result["speed"] if row.get("load")]
    if len(rows) < 2:
        return None
    figure, panel = _single("output tokens a second", "ms between tokens, median")
    for who in ("plain", "drafted"):
        flows = [(row["batch"], row["load"][who]) for row in rows if row["load"][who]]
        if flows:
            rates = [flow["output_tokens_per_s"] for _, flow in flows]
            waits = [flow["itl_ms"]["p50"] or float("nan") for _, flow in flows]
            panel.plot(rates, waits, marker="o", label=who)
            for (batch, _), x, y in zip(flows, rates, waits, strict=True):
                panel.annotate(str(batch), (x, y), textcoords="offset points", xytext=(4, 4))
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
    return figure


def _speedup(result: dict[str, Any]) -> Figure | None:
    rows = [row for row in result["speed"] if row["speedup"] is not None]
    if len(rows) < 2:
        return None
    figure, panel = _single("batch", "speed over plain decoding")
    batches = [row["batch"] for row in rows]
    panel.plot(batches, [row["speedup"] for row in rows], marker="o", label="measured")
    predicted = [float("nan") if (s := row["predicted_speedup"]) is None else s for row in rows]
    panel.plot(batches, predicted, "--", marker=".", label="predicted from the parts")
    panel.axhline(1, color="grey", linewidth=1, label="plain decoding: below, it does not pay")
    _batch_axis(panel, rows)
    return figure


_PLOTS: tuple[tuple[str, str, Callable[[dict[str, Any]], Figure | None]], ...] = (
    ("positions.png", "Acceptance at each draft position, task by task", _positions),
    ("histogram.png", "How many drafts a pass accepted, task by task", _histogram),
    ("depth.png", "Tau if drafts had stopped earlier (1 + u_1 + .. + u_d)", _depth),
    ("context.png", "Tau against the length of the prompt, with 95 % intervals", _context),
    ("batch.png", "Tau against the batch size, with 95 % intervals", _batch),
    ("load.png", "Waiting against output at each concurrency", _latency),
    ("speedup.png", "Speedup against the batch size, measured and predicted", _speedup),
)

FILES = frozenset(file for file, _, _ in _PLOTS)


def _tasks(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Tasks with drafts and, where they are several, what they are together, so called."""
    tasks = [(name, one) for name, one in result["tasks"].items() if one["per_position"]]
    return [*tasks, (POOLED, result["overall"])] if len(tasks) > 1 else tasks


def _panels(
    result: dict[str, Any], draw: Callable[[Axes, dict[str, Any]], None], label: str
) -> Figure | None:
    from matplotlib.figure import Figure

    # The pooled panel comes last, and is kept where tasks are too many to be shown.
    shown = _tasks(result)
    shown = [*shown[: MOST_PANELS - 1], *shown[MOST_PANELS - 1 :][-1:]]
    if not shown:
        return None
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(1 + 3.4 * columns, 0.6 + 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(shown) :]:
        panel.set_axis_off()
    for panel, (name, metrics) in zip(panels.flat, shown, strict=False):
        draw(panel, metrics)
        panel.set_title(f"{name} ({metrics['passes']} passes)", fontsize="medium")
        panel.grid(axis="y", alpha=0.3)
    for row in panels:
        row[0].set_ylabel(label)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def side_by_side(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` empty panels in a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * count, 4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _single(x: str, y: str) -> tuple[Figure, Axes]:
    figure, (panel,) = side_by_side(1)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    return figure, panel


def _with_bars(
    panel: Axes, places: Iterable[int], points: list[dict[str, Any]], label: str
) -> None:
    """Taus with their intervals as error bars; a tau without an interval has none."""
    taus = [one["tau"] for one in points]
    spans = [one["tau_ci"] or [one["tau"]] * 2 for one in points]
    # A percentile interval need not hold the figure itself.
    below = [max(0.0, tau - low) for tau, (low, _) in zip(taus, spans, strict=True)]
    above = [max(0.0, high - tau) for tau, (_, high) in zip(taus, spans, strict=True)]
    panel.errorbar(list(places), taus, [below, above], marker="o", capsize=4, label=label)


def _batch_axis(panel: Axes, rows: list[dict[str, Any]]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks([row["batch"] for row in rows], [str(row["batch"]) for row in rows])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
