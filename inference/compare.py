"""`compare`: two measured runs on the same prompts, request by request.

Both runs answered the same conversations, so a conversation is drawn for both at once (paired
cluster bootstrap, spec/verifier.md 6.5). That leaves out what makes one conversation easier than
another, and is why two heads can be told apart on prompts whose own intervals overlap.

The first run is the reference: a difference is the other's tau less the reference's. Runs with
other settings, prompts or target are refused, with what differs named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from headsmith.errors import HeadsmithError
from headsmith.inference.advice import FEWEST, more_to_tell_apart
from headsmith.inference.records import RESULT_SCHEMA, Steps
from headsmith.inference.resample import cluster_counts, drawn_sums, interval

SCHEMA = "headsmith.compare/1"
# What a comparison is about, or what tau does not depend on; all other settings must agree.
FREE = frozenset({"drafter", "draft", "batch", "prompts", "prompts_sha256"})


@dataclass(slots=True)
class Measured:
    """A run that `headsmith eval --out` wrote. `name` is what the user called it."""

    name: str
    result: dict[str, Any]
    steps: dict[tuple[str, str], Steps]  # (task, id) -> counts, in the order of the run

    @property
    def firsts(self) -> set[tuple[str, str]]:
        """Requests whose prompt no answer is part of."""
        return {key for key in self.steps if _turn(key[1]) == 1}


def load_result(file: Path) -> dict[str, Any]:
    """A result.json; HeadsmithError where there is none that this version can read."""
    text = _read(file)
    try:
        result = json.loads(text)
    except ValueError as fault:
        raise HeadsmithError(f"{file} cannot be read: {fault}") from None
    if not isinstance(result, dict) or result.get("schema") != RESULT_SCHEMA:
        raise HeadsmithError(f"{file} is not a result of headsmith eval ({RESULT_SCHEMA})")
    return result


def load_measured(path: str | Path) -> Measured:
    """A run from its folder, or from its result.json with steps.jsonl beside it."""
    given = Path(path)
    file = given / "result.json" if given.is_dir() else given
    result = load_result(file)
    texts = _read(file.parent / "steps.jsonl").splitlines()
    try:
        steps = [Steps.from_json(json.loads(text)) for text in texts]
    except ValueError as fault:
        raise HeadsmithError(f"the steps.jsonl of {given} cannot be read: {fault}") from None
    return Measured(str(path), result, {(one.task, one.id): one for one in steps})


def compare(paths: Sequence[str | Path], *, seed: int = 0) -> dict[str, Any]:
    """The object that `headsmith compare --json` writes: every run against the first.

    Raises HeadsmithError where a run cannot be read or two cannot be compared.
    """
    if len(paths) < 2:
        raise HeadsmithError("one run is nothing to compare; name two or more")
    reference, *others = [load_measured(path) for path in paths]
    for other in others:
        refuse_unlike(reference, other)
    return {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "runs": [_describe(run) for run in (reference, *others)],
        "comparisons": [_compare(reference, other, seed) for other in others],
    }


def refuse_unlike(reference: Measured, other: Measured) -> None:
    """HeadsmithError that names every setting, the target or the prompts where they differ."""
    unlike = [
        f"{name} is {_short(ours)} and {_short(theirs)}"
        for name, ours, theirs in _differing_settings(reference.result, other.result)
    ]
    unlike += _differing_prompts(reference, other)
    if unlike:
        raise HeadsmithError(
            f"{reference.name} and {other.name} cannot be compared: {'; '.join(unlike)}; "
            "measure both alike"
        )


def _differing_settings(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = [
        (f"target.{key}", ours["target"].get(key), theirs["target"].get(key))
        for key in ("fingerprint", "dtype")
    ]
    one, two = ours["setup"], theirs["setup"]
    unread = FREE
    # Without a temperature nothing is drawn but the bootstrap.
    if one.get("temperature") == two.get("temperature") == 0:
        unread = unread | {"seed"}
    names = [key for key in dict.fromkeys([*one, *two]) if key not in unread]
    pairs += [(key, one.get(key), two.get(key)) for key in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _differing_prompts(reference: Measured, other: Measured) -> list[str]:
    ours, theirs = reference.firsts, other.firsts
    said = [
        f"{where} lacks {len(missing)} of the requests (first: {':'.join(min(missing))})"
        for where, missing in ((other.name, ours - theirs), (reference.name, theirs - ours))
        if missing
    ]
    hashes = [run.result["setup"].get("prompts_sha256") for run in (reference, other)]
    changed = sorted(
        key
        for key in ours & theirs
        if reference.steps[key].prompt_tokens != other.steps[key].prompt_tokens
    )
    if changed:
        said.append(f"the prompt of {':'.join(changed[0])} is of another length")
    elif not said and None not in hashes and hashes[0] != hashes[1]:
        said.append("the texts of the prompts differ")
    return said


def _describe(run: Measured) -> dict[str, Any]:
    head, setup = run.result["head"], run.result["setup"]
    return {
        "name": run.name,
        "head": head["path"] if head else None,
        "kind": head["kind"] if head else None,
        "drafter": setup["drafter"],
        "draft": setup["draft"],
    }


def _compare(reference: Measured, other: Measured, seed: int) -> dict[str, Any]:
    shared = [key for key in reference.steps if key in other.steps]
    tasks = {
        task: _row(reference, other, [key for key in shared if key[0] == task], seed)
        for task in dict.fromkeys(key[0] for key in shared)
    }
    return {
        "reference": reference.name,
        "other": other.name,
        "tasks": tasks,
        "overall": _row(reference, other, shared, seed),
        "notes": _notes(reference, other, shared, tasks),
    }


def _row(
    reference: Measured, other: Measured, keys: Sequence[tuple[str, str]], seed: int
) -> dict[str, Any]:
    """Both taus over these requests, and their difference with its interval."""
    ours, theirs = (cluster_counts([run.steps[key] for key in keys]) for run in (reference, other))
    # A conversation without a pass in both (answers of one token) says nothing of drafting.
    names = list(dict.fromkeys([*ours, *theirs]))
    none = [0, 0]
    counts = np.array(
        [[*ours.get(name, none), *theirs.get(name, none)] for name in names], dtype=np.float64
    ).reshape(-1, 4)
    row: dict[str, Any] = {"conversations": len(names), "requests": len(keys)}
    row |= dict.fromkeys(("reference_tau", "tau", "difference", "difference_ci", "longer_share"))
    row |= {"verdict": "too few", "more_to_tell_apart": None}
    total = counts.sum(axis=0)
    if not (total[1] and total[3]):
        return row
    difference = float(_differences(total[None])[0])
    row |= {"reference_tau": float(total[0] / total[1]), "tau": float(total[2] / total[3])}
    row["difference"] = difference
    if len(names) < 2:
        return row
    drawn = drawn_sums(counts, seed=seed)
    values = _differences(drawn[(drawn[:, 1] > 0) & (drawn[:, 3] > 0)])
    ci = interval(values)
    row |= {"difference_ci": ci, "longer_share": float((values > 0).mean())}
    # So few conversations have too little spread for an interval to decide anything.
    if len(names) >= FEWEST:
        row["verdict"] = "longer" if ci[0] > 0 else "shorter" if ci[1] < 0 else "undecided"
        row["more_to_tell_apart"] = more_to_tell_apart(len(names), difference, ci)
    return row


def _differences(sums: np.ndarray) -> np.ndarray:
    """The other's tau less the reference's, from sums [draws, 4]."""
    found: np.ndarray = sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]
    return found


def _notes(
    reference: Measured,
    other: Measured,
    shared: Sequence[tuple[str, str]],
    tasks: dict[str, dict[str, Any]],
) -> list[str]:
    notes = []
    drafts = [run.result["setup"]["draft"] for run in (reference, other)]
    if drafts[0] != drafts[1]:
        notes.append(
            f"the drafts differ ({drafts[0]} and {drafts[1]}): the difference is that of head and "
            "draft together"
        )
    left = len(reference.steps) + len(other.steps) - 2 * len(shared)
    if left:
        notes.append(f"{left} later turns were answered in one of the runs only and are left out")
    later = sum(
        reference.steps[key].prompt_tokens != other.steps[key].prompt_tokens for key in shared
    )
    if later:
        notes.append(f"{later} later turns follow other answers in the two runs")
    verdicts = {row["verdict"] for row in tasks.values()}
    if {"longer", "shorter"} <= verdicts:
        notes.append("the tasks disagree: judge by the task that you serve, not by all of them")
    devices = [run.result["device"].get("name") for run in (reference, other)]
    if devices[0] != devices[1]:
        notes.append(f"measured on {devices[0]} and {devices[1]}: compare tau, not the speeds")
    return notes


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HeadsmithError(
            f"there is no {file}; name a folder that headsmith eval --out wrote"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise HeadsmithError(f"{file} cannot be read: {fault}") from None


def _turn(request: str) -> int:
    """1 for the first turn of a conversation, whose id ends with `#N` where it has several."""
    number = request.rpartition("#")[2]
    return int(number) if "#" in request and number.isdigit() else 1


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:24]}..."
