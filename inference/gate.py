"""`--gate FILE`: bounds that a run must keep to, for CI.

The file is a YAML list. Each entry names a metric and `min`, `max` or both:

    - {metric: tau, task: gsm8k, min: 1.8}     a task's figure
    - {metric: tau_low, min: 1.6}              without a task: of all prompts (`overall`)
    - {metric: speedup, batch: 4, min: 1.2}    without a batch: at every batch size of the run
    - {metric: equality_fails, max: 0}

A figure that the run does not have (a speedup without a baseline) misses its bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError, model_validator

from headsmith.errors import GateNotMet, HeadsmithError

OVERALL = "overall"
_METRICS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    name: itemgetter(name)
    for name in (
        "tau",
        "tau_macro",
        "acceptance_rate",
        "zero_accept_fraction",
        "nodes_per_token",
        "requests",
        "tokens",
        "passes",
    )
} | {
    "tau_low": lambda metrics: metrics["tau_ci"][0] if metrics["tau_ci"] else None,
    "tau_high": lambda metrics: metrics["tau_ci"][1] if metrics["tau_ci"] else None,
}
_SPEED: dict[str, Callable[[dict[str, Any]], float | None]] = {
    name: itemgetter(name)
    for name in (
        "speedup",
        "predicted_speedup",
        "tokens_per_s",
        "baseline_tokens_per_s",
        "cost_per_token_ms",
        "draft_ms",
        "verify_ms",
        "other_ms",
        "peak_memory_bytes",
    )
} | {
    "ttft_ms_p50": lambda row: row["ttft_ms"]["p50"],
    "ttft_ms_p95": lambda row: row["ttft_ms"]["p95"],
    "itl_ms_p50": lambda row: row["itl_ms"]["p50"],
    "itl_ms_p95": lambda row: row["itl_ms"]["p95"],
}
_RUN: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "equality_fails": lambda result: (result["equality"] or {}).get("fails"),
    "equality_ties": lambda result: (result["equality"] or {}).get("ties"),
    "degenerate_answers": lambda result: result["degenerate"]["answers"],
    "warnings": lambda result: len(result["warnings"]),
}
_POSITION = re.compile(r"([uc])_([1-9]\d*)")
KNOWN = (*_METRICS, "u_N", "c_N", *_SPEED, *_RUN)


class Bound(BaseModel):
    """One entry of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str
    task: str = OVERALL
    batch: int | None = None
    min: FiniteFloat | None = None
    max: FiniteFloat | None = None

    @model_validator(mode="after")
    def _check(self) -> Bound:
        of_task = self.metric in _METRICS or _POSITION.fullmatch(self.metric)
        if not of_task and self.metric not in (*_SPEED, *_RUN):
            raise ValueError(f"metric {self.metric!r} is unknown; known are {', '.join(KNOWN)}")
        if self.min is None and self.max is None:
            raise ValueError(f"the bound of {self.metric} is missing; add min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} of {self.metric} is above its max {self.max:g}")
        if not of_task and self.task != OVERALL:
            raise ValueError(f"{self.metric} is of the whole run and has no task")
        if self.batch is not None and self.metric not in _SPEED:
            raise ValueError(f"{self.metric} does not depend on the batch size; leave batch out")
        return self


def load_gate(path: str | Path) -> list[Bound]:
    """The bounds of a file; HeadsmithError names the entry that cannot be used."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        reason = " ".join(str(fault).split())
        raise HeadsmithError(f"the gate {path} cannot be read: {reason}") from None
    if not isinstance(tree, list) or not tree:
        raise HeadsmithError(
            f"the gate {path} is not a list of bounds such as {{metric: tau, min: 1.8}}"
        )
    bounds = []
    for number, entry in enumerate(tree, start=1):
        try:
            bounds.append(Bound.model_validate(entry))
        except ValidationError as fault:
            first = fault.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            said = first["msg"].removeprefix("Value error, ")
            raise HeadsmithError(
                f"{path}, entry {number}: {f'{where}: ' if where else ''}{said}"
            ) from None
    return bounds


def check_names(bounds: Iterable[Bound], tasks: Iterable[str], batches: Sequence[int]) -> None:
    """HeadsmithError for a task or batch size that the run will not measure."""
    known = [*dict.fromkeys(tasks), OVERALL]
    for bound in bounds:
        if bound.task not in known:
            raise HeadsmithError(
                f"the gate bounds {bound.metric} of task {bound.task!r}, which is not among the "
                f"prompts; tasks are {', '.join(known)}"
            )
        if bound.batch is not None and bound.batch not in batches:
            raise HeadsmithError(
                f"the gate bounds {bound.metric} at batch {bound.batch}, which is not measured; "
                f"add it to --batch {','.join(map(str, batches))}"
            )


def judge(bounds: Iterable[Bound], result: dict[str, Any]) -> list[dict[str, Any]]:
    """`gate` of result.json: every bound with the figure found, whether it is met, a sentence."""
    return [row for bound in bounds for row in _rows(bound, result)]


def raise_if_missed(result: dict[str, Any]) -> None:
    """GateNotMet (exit code 1), a sentence for each bound that was missed."""
    missed = [row["says"] for row in result.get("gate", ()) if not row["met"]]
    if missed:
        raise GateNotMet("the gate is not met: " + "; ".join(missed))


def _rows(bound: Bound, result: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for place, value in _values(bound, result):
        low, high = bound.min, bound.max
        met = (
            value is not None and (low is None or value >= low) and (high is None or value <= high)
        )
        wanted = " and ".join(
            f"{word} {limit:g}"
            for word, limit in (("at least", low), ("at most", high))
            if limit is not None
        )
        is_ = "was not measured" if value is None else f"is {value:.4g}"
        says = f"{bound.metric} {place} {is_}, the gate asks for {wanted}"
        yield bound.model_dump() | {"value": value, "met": met, "says": says}


def _values(bound: Bound, result: dict[str, Any]) -> Iterable[tuple[str, float | None]]:
    """The figures that a bound is about, each with where it was found."""
    name = bound.metric
    if name in _RUN:
        yield "of the run", _RUN[name](result)
    elif name in _SPEED:
        for row in result["speed"]:
            if bound.batch in (None, row["batch"]):
                yield f"at batch {row['batch']}", _SPEED[name](row)
    else:
        whole = bound.task == OVERALL
        metrics = result["overall"] if whole else result["tasks"].get(bound.task)
        place = "of all prompts" if whole else f"of {bound.task}"
        yield place, None if metrics is None else _of_metrics(name, metrics)


def _of_metrics(name: str, metrics: dict[str, Any]) -> float | None:
    position = _POSITION.fullmatch(name)
    if position is None:
        return _METRICS[name](metrics)
    rates = metrics["per_position" if position.group(1) == "u" else "conditional"]
    number = int(position.group(2))
    return rates[number - 1] if number <= len(rates) else None
