"""The numbers of a card, and how each was measured: from result.json of `headsmith eval`, and from
the validation in headsmith.json. What a file does not say is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headsmith.models.results import read_result

UNKNOWN = "not recorded"


@dataclass(frozen=True, slots=True)
class How:
    """The circumstances of a measurement, as the table says them."""

    draft: str
    temperature: str
    template: str
    hardware: str
    dtype: str
    date: str
    tokens: str

    @classmethod
    def of_result(cls, result: dict[str, Any]) -> How:
        setup, device = result["setup"], result["device"]
        rule = setup.get("rule", "greedy")
        lossy = "" if setup.get("lossless", True) else ", lossy"
        system = ", with a system prompt" if setup.get("system_prompt") else ""
        threads = f", {device['threads']} threads" if device.get("type") == "cpu" else ""
        return cls(
            draft=str(setup.get("draft") or UNKNOWN),
            temperature=f"{setup.get('temperature', 0):g} ({rule}{lossy})",
            template=_template(setup.get("template_sha256")) + system,
            hardware=f"{device.get('name') or device.get('type') or UNKNOWN}{threads}",
            dtype=str(result["target"].get("dtype", UNKNOWN)),
            date=str(result.get("created", UNKNOWN))[:10],
            tokens=str(setup.get("max_new_tokens", UNKNOWN)),
        )

    @classmethod
    def of_validation(cls, about: dict[str, Any]) -> How:
        recipe = about.get("recipe") or {}
        section = recipe.get("validation") or {}
        return cls(
            draft=str(section.get("draft", UNKNOWN)),
            temperature="0 (greedy)",
            template="the target's own",
            hardware=UNKNOWN,
            dtype=str((recipe.get("target") or {}).get("dtype", UNKNOWN)),
            date=UNKNOWN,
            tokens=str(section.get("max_new_tokens", UNKNOWN)),
        )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """METRICS of one set of prompts."""

    on: str
    metrics: dict[str, Any]
    how: How


@dataclass(frozen=True, slots=True)
class Speed:
    """Throughput with the head and without, at one batch size."""

    on: str
    row: dict[str, Any]
    how: How


@dataclass(slots=True)
class Measured:
    """All that a card can say of a head's worth. `remarks` are what the measurements say against
    themselves, and of the output.
    """

    acceptance: list[Acceptance] = field(default_factory=list)
    speed: list[Speed] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def draft(self) -> str | None:
        """The shape that the first measurement drafted with."""
        known = (one.how.draft for one in self.acceptance if one.how.draft != UNKNOWN)
        return next(known, None)


def gather(about: dict[str, Any], sha256: str | None, results: list[Path]) -> Measured:
    """The numbers of the head whose weights hash to `sha256` and whose headsmith.json is `about`.

    Raises HeadsmithError for a result that is of another head or of none.
    """
    found = Measured()
    for path in results:
        _add(found, path, read_result(path, sha256))
    validation = about.get("validation") or {}
    if validation.get("tau") is not None:
        how = How.of_validation(about)
        found.acceptance.append(Acceptance("validation in training", validation, how))
    return found


def _add(found: Measured, path: Path, result: dict[str, Any]) -> None:
    how = How.of_result(result)
    tasks = {name: one for name, one in result["tasks"].items() if one.get("tau") is not None}
    rows = dict(tasks)
    if len(tasks) != 1 and result["overall"].get("tau") is not None:
        rows = {"all together": result["overall"], **tasks}
    found.acceptance += [Acceptance(name, metrics, how) for name, metrics in rows.items()]
    names = " + ".join(tasks)
    found.speed += [
        Speed(names, row, how) for row in result.get("speed") or [] if row.get("speedup")
    ]
    found.remarks += list(_remarks(result))


def _remarks(result: dict[str, Any]) -> Iterator[str]:
    equality = result.get("equality")
    if equality:
        yield (
            f"{equality['checked']} output tokens were checked against the target: "
            f"{equality['exact']} its own choice, {equality['ties']} numerical ties, "
            f"{equality['fails']} wrong."
        )
    if not result["setup"].get("lossless", True):
        yield "The rule is lossy: the output is not the target's own."
    yield from result.get("warnings") or []


def _template(digest: str | None) -> str:
    return f"the target's (sha256 {digest[:12]})" if digest else "none"
