"""What doctor has to say: each finding is one sentence that ends with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headsmith.errors import HeadsmithError

# error: it cannot work, or drafts what nobody trained. warning: it works, but worse, or not in
# every engine. note: worth knowing.
Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found."""

    level: Level
    check: str
    sentence: str


def error(check: str, sentence: str) -> Finding:
    return Finding("error", check, sentence)


def warning(check: str, sentence: str) -> Finding:
    return Finding("warning", check, sentence)


def note(check: str, sentence: str) -> Finding:
    return Finding("note", check, sentence)


def refuse_errors(findings: Sequence[Finding], allow_mismatch: bool = False) -> list[str]:
    """The sentences of errors and warnings. Raises HeadsmithError with the first error, unless
    `allow_mismatch`.
    """
    errors = [one for one in findings if one.level == "error"]
    if errors and not allow_mismatch:
        more = len(errors) - 1
        said = f" (and {more} more; headsmith doctor names them)" if more else ""
        raise HeadsmithError(errors[0].sentence + said)
    return [one.sentence for one in findings if one.level != "note"]
