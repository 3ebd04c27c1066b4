"""`examine`: everything that doctor can find in a head's folder, and beside its target.

Nothing is loaded: of the head its tensors are read, of the target its config, its tokenizer and two
matrices, so it takes seconds even for a target that does not fit this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError
from headsmith.models.doctor.checkpoint import Checkpoint, check_files, check_record
from headsmith.models.doctor.findings import Finding, error, refuse_errors
from headsmith.models.doctor.keys import check_keys, check_kinds, check_taps
from headsmith.models.doctor.pairing import (
    check_body,
    check_ends,
    check_identity,
    check_serving,
    check_shared,
    check_width,
)
from headsmith.models.doctor.target import TargetFacts

_LEVELS = ("error", "warning", "note")
SCHEMA = "headsmith.doctor/1"


def examine(folder: str | Path, target: TargetFacts | None = None) -> list[Finding]:
    """What is wrong with the head in `folder`, errors first; with no target, only what its own
    files show.
    """
    place = Path(folder)
    if not place.is_dir():
        sentence = f"head {place} does not exist; give the folder of a checkpoint"
        return [error("checkpoint", sentence)]
    try:
        head = Checkpoint.open(place)
    except HeadsmithError as fault:
        return [error("checkpoint", f"{fault}; give the folder of a checkpoint")]
    malformed = list(check_kinds(head))
    if malformed:
        return malformed
    layers = _layers(head, target)
    found = list(check_width(head, target)) if target else []
    found += [*check_keys(head), *check_taps(head, layers)]
    found += [*check_files(head, layers), *check_record(head)]
    if target is not None:
        for check in (check_identity, check_body, check_ends, check_shared, check_serving):
            found += check(head, target)
    return sorted(found, key=lambda one: _LEVELS.index(one.level))


def vet(
    folder: str | Path, target: str, revision: str | None = None, allow_mismatch: bool = False
) -> list[str]:
    """What speaks against using the head with the target at path or Hub id `target`, as warnings.

    For commands that go on to load both. Raises HeadsmithError with the first error, unless
    `allow_mismatch`. A target that cannot be read is left to whoever loads it.
    """
    try:
        facts = TargetFacts.read(target, revision)
    except HeadsmithError:
        facts = None
    return refuse_errors(examine(folder, facts), allow_mismatch)


def report(folder: str, target: str | None, findings: list[Finding]) -> dict[str, Any]:
    """The findings as the object that `headsmith doctor --json` writes."""
    counts = {f"{level}s": sum(one.level == level for one in findings) for level in _LEVELS}
    listed = [
        {"level": one.level, "check": one.check, "sentence": one.sentence} for one in findings
    ]
    return {"schema": SCHEMA, "head": folder, "target": target, **counts, "findings": listed}


def _layers(head: Checkpoint, target: TargetFacts | None) -> int | None:
    """L, from the target or from what headsmith.json says of it."""
    if target is not None:
        return target.identity.num_layers
    said = (head.about.get("target") or {}).get("num_layers")
    return said if isinstance(said, int) else None
