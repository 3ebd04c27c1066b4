"""What readers share: the notes of a pass over a source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LAYOUTS = "a JSON array, JSON Lines, Arrow or Parquet"
LINE_SUFFIXES = (".jsonl", ".ndjson")
FILE_SUFFIXES = (".json", *LINE_SUFFIXES, ".arrow", ".parquet")


@dataclass(slots=True)
class Notes:
    """What a pass over a source found out: rows left out, warnings, roles, how far it got."""

    skipped: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    done: int = 0  # in the unit of `total`: bytes of a file, rows of a table
    total: int = 0  # 0 where it is not known


class Unused(Exception):
    """Why a row is left out."""


def first_line(error: Exception) -> str:
    """What an exception of a library says, short enough for a sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
