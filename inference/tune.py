"""`headsmith tune`: which draft to serve at which load, measured instead of guessed.

Every draft shape is an evaluation of its own, over the same prompts, batch sizes and contexts, with
plain decoding in turn beside it, so that a machine that slows down slows both. `tune.json` (schema
`headsmith.tune/1`):

    runs          a draft each: draft, folder (None without `out`), tau, tau_ci, nodes_per_token,
                  fails, contexts {task: {length: tau}}, speed (rows as in result.json)
    best          a batch size each: batch, draft (`none` where no draft pays), speedup,
                  cost_per_token_ms, and `close`: drafts within CLOSE of it, which noise may explain
    batch_limit   the largest batch up to which the best draft pays at every size; None for none
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError
from headsmith.files import atomic_files, write_json
from headsmith.inference.evaluate import load_session, run_session
from headsmith.inference.measure import Progress, Session
from headsmith.inference.plots import can_plot, contexts
from headsmith.inference.prompts import prompts_sha256
from headsmith.inference.resume import settings_key
from headsmith.inference.settings import EvalSettings

TUNE_SCHEMA = "headsmith.tune/1"
CHAINS = (1, 2, 3, 4, 6)
TREES = ("tree:12,3,3", "tree:24,4,5")
# Two speeds that differ by less may change places when measured again (docs/reports.md).
CLOSE = 0.03


def tune(
    settings: EvalSettings, drafts: Sequence[str] = (), on_progress: Progress | None = None
) -> dict[str, Any]:
    """Measures `drafts`, or those that the drafter is usually given; returns the object above.

    With `out`, each run is written to a folder of its own there, finished ones are not repeated,
    and `tune.json` and its plot lie beside them. HeadsmithError for what cannot be used.
    """
    if not settings.baseline:
        raise HeadsmithError("tune compares with plain decoding; leave --no-baseline out")
    if settings.drafter == "none":
        raise HeadsmithError("drafter none drafts nothing, so there is nothing to tune")
    first = load_session(replace(settings, draft=drafts[0]) if drafts else settings)
    given = list(dict.fromkeys(drafts or usual_drafts(first)))
    folders = [_folder(settings.out, draft) for draft in given]
    if len(set(folders)) < len(folders) and settings.out is not None:
        raise HeadsmithError(f"drafts {', '.join(given)}: two of them need the same folder")
    results = []
    for number, (draft, folder) in enumerate(zip(given, folders, strict=True)):
        told = _shifted(on_progress, number, len(given), draft)
        results.append(_measured(first, replace(settings, draft=draft, out=folder), told))
    found = summarise_runs(results, folders, settings.command)
    if settings.out is not None:
        _write(Path(settings.out), found)
    return found


def usual_drafts(session: Session) -> list[str]:
    """Chains of growing depth, and trees where the drafter ranks its tokens."""
    head = session.head
    if session.settings.drafter.startswith("lookahead"):
        raise HeadsmithError(
            "lookahead has no draft shape; compare windows with headsmith eval and compare"
        )
    if head is not None and head.kind == "medusa":
        depths = [depth for depth in CHAINS if depth <= head.config.num_heads]
        calibrated = getattr(head, "calibration", None) is not None
        return [*(f"chain:{depth}" for depth in depths), *(["stored"] if calibrated else [])]
    trees = TREES if head is not None and session.settings.rule != "ratio" else ()
    return [*(f"chain:{depth}" for depth in CHAINS), *trees]


def summarise_runs(
    results: Sequence[dict[str, Any]], folders: Sequence[str | None], command: str
) -> dict[str, Any]:
    """The object of `tune.json` from results of the same prompts."""
    first = results[0]
    runs = [
        {
            "draft": result["setup"]["draft"],
            "folder": folder,
            "tau": result["overall"]["tau"],
            "tau_ci": result["overall"]["tau_ci"],
            "nodes_per_token": result["overall"]["nodes_per_token"],
            "fails": result["equality"]["fails"] if result["equality"] else None,
            "contexts": {
                task: {str(length): metrics["tau"] for length, metrics in points}
                for task, points in contexts(result).items()
            },
            "speed": result["speed"],
        }
        for result, folder in zip(results, folders, strict=True)
    ]
    best = [_best(runs, batch) for batch in first["setup"]["batch"]]
    return {
        "schema": TUNE_SCHEMA,
        "command": command,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": first["versions"],
        "device": first["device"],
        "target": first["target"],
        "head": first["head"],
        "setup": {name: value for name, value in first["setup"].items() if name != "draft"},
        "runs": runs,
        "best": best,
        "batch_limit": _limit(best),
        "warnings": list(dict.fromkeys(line for one in results for line in one["warnings"])),
    }


def _best(runs: Sequence[dict[str, Any]], batch: int) -> dict[str, Any]:
    """By speedup, which each run measured in turn with its own plain decoding."""
    rows = [(run["draft"], row) for run in runs for row in run["speed"] if row["batch"] == batch]
    known = [(draft, row) for draft, row in rows if row["speedup"] is not None]
    ranked = sorted(known, key=lambda one: one[1]["speedup"], reverse=True)
    if not ranked or not ranked[0][1]["pays"]:
        return {
            "batch": batch,
            "draft": "none",
            "speedup": 1.0,
            "cost_per_token_ms": None,
            "close": [],
        }
    draft, row = ranked[0]
    return {
        "batch": batch,
        "draft": draft,
        "speedup": row["speedup"],
        "cost_per_token_ms": row["cost_per_token_ms"],
        "close": [d for d, one in ranked[1:] if one["speedup"] >= (1 - CLOSE) * row["speedup"]],
    }


def _limit(best: Sequence[dict[str, Any]]) -> int | None:
    last = None
    for row in sorted(best, key=lambda row: row["batch"]):
        if row["draft"] == "none":
            break
        last = row["batch"]
    return last


def _measured(first: Session, settings: EvalSettings, told: Progress | None) -> dict[str, Any]:
    """A run, or the result of it that lies in its folder from an earlier call."""
    session = Session(settings, first.target, first.head, first.conversations, first.builder, told)
    session.warnings += first.warnings
    key = settings_key(session, prompts_sha256(session.conversations))
    if settings.out is None:
        return run_session(session)
    folder = Path(settings.out)
    mark = folder / "settings.json"
    if mark.is_file() and (folder / "result.json").is_file():
        if json.loads(mark.read_text(encoding="utf-8")) != key:
            raise HeadsmithError(
                f"{folder} holds a run with other settings, prompts or weights; choose another "
                "--out, or delete it"
            )
        known: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return known
    result = run_session(session)
    write_json(mark, key)
    return result


def _folder(out: str | None, draft: str) -> str | None:
    return None if out is None else str(Path(out) / re.sub(r"[^\w.]+", "-", draft).strip("-"))


def _shifted(told: Progress | None, number: int, runs: int, draft: str) -> Progress | None:
    """Progress over all runs: each counts as much as the one that is measured now."""
    if told is None:
        return None
    return lambda done, total, label: told(number * total + done, runs * total, f"{draft}, {label}")


def _write(out: Path, found: dict[str, Any]) -> None:
    from headsmith.inference.tune_report import draw_tune

    with atomic_files(out) as folder:
        write_json(folder / "tune.json", found)
        if can_plot():
            (folder / "tune.png").write_bytes(draw_tune(found))
