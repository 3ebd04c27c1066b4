"""Several sources as one file, each with its share of the rows.

Which rows are taken, and their order, depends on the seed and on the rows themselves: every row
draws a number from the hash of its text, and the smallest come first. The same seed therefore
gives the same file, whatever its rows are called, and a larger mixture holds the smaller ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from headsmith.data.chats import Chat, Chats, line_of
from headsmith.data.lines import Spool, check_out
from headsmith.errors import HeadsmithError


@dataclass(slots=True)
class Mixed:
    """What was read and what was written, by source; `repeated` rows are there more than once."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)


def parse_sources(given: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """`PATH=WEIGHT` texts as paths and weights; None for the weights when no text has one."""
    names: list[str] = []
    weights: list[float | None] = []
    for text in given:
        name, separator, weight = text.rpartition("=")
        if not separator or Path(text).exists():
            name, weight = text, ""
        names.append(name)
        weights.append(_weight(text, weight) if weight else None)
    known = [weight for weight in weights if weight is not None]
    if known and len(known) < len(weights):
        bare = names[weights.index(None)]
        raise HeadsmithError(f"{bare} has no weight and others have; give {bare}=WEIGHT, or none")
    return names, known or None


def _weight(text: str, weight: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise HeadsmithError(
            f"the weight of {text} is {weight!r}; it must be a number above 0, as in chats.jsonl=2"
        )
    return value


def mix(
    sources: Sequence[str],
    out: Path,
    weights: Sequence[float] | None = None,
    *,
    rows: int | None = None,
    repeat: bool = False,
    seed: int = 0,
    chats: Chats | None = None,
    progress: Callable[[int], None] | None = None,
) -> Mixed:
    """Write a mixture of `sources` to the JSONL file `out`.

    `weights` are shares of the rows, to be divided by their sum; without, a source's size is its
    weight. `rows` None takes as many as the weights allow without a row twice. Raises
    HeadsmithError when there are not so many rows and `repeat` is off.
    """
    if rows is not None and rows < 1:
        raise HeadsmithError(f"rows is {rows}; it must be 1 or more")
    if weights is not None and len(weights) != len(sources):
        raise HeadsmithError(f"{len(sources)} sources have {len(weights)} weights; give one each")
    check_out(out, sources)
    chats = chats or Chats(sources)
    with Spool(out) as spool:
        draws = _spooled(chats, spool, seed, progress)
        sizes = {source: len(draws[source]) for source in sources}
        shares = dict(zip(sources, weights or sizes.values(), strict=True))
        counts = _counts(sizes, shares, rows, repeat)
        spool.write(_order(draws, counts))
    result = Mixed(chats.read.copy())
    for source in sources:
        result.written[source] = counts[source]
        result.repeated[source] = max(counts[source] - sizes[source], 0)
    return result


# By source: what each of its rows drew, and its number in the spool.
_Draws = dict[str, list[tuple[int, int]]]


def _spooled(
    chats: Chats, spool: Spool, seed: int, progress: Callable[[int], None] | None
) -> _Draws:
    draws: _Draws = {source: [] for source in chats.sources}
    seen: Counter[bytes] = Counter()
    for chat in chats:
        number = spool.add(line_of(chat.to_json()))
        draws[chat.source].append((_draw(chat, seed, seen), number))
        if progress is not None:
            progress(len(spool))
    return {source: sorted(drawn) for source, drawn in draws.items()}


def _draw(chat: Chat, seed: int, seen: Counter[bytes]) -> int:
    """A number from 0 to 2**64 by the seed and the text; copies of a text draw numbers of their
    own, lest they all be taken together.
    """
    text = line_of({"messages": chat.messages})
    digest = blake2b(text, digest_size=16).digest()
    seen[digest] += 1
    key = blake2b(f"{seed}/{seen[digest]}/".encode() + digest, digest_size=8)
    return int.from_bytes(key.digest(), "big")


def _counts(
    sizes: dict[str, int], weights: dict[str, float], rows: int | None, repeat: bool
) -> dict[str, int]:
    """How many rows of each source: the weights' shares of `rows`, rounded to add up to it."""
    total = sum(weights.values())
    shares = {source: weight / total for source, weight in weights.items()}
    if rows is None:
        # The largest number of which no source has to give more than it has.
        rows = min(math.floor(sizes[s] / share + 1e-6) for s, share in shares.items())
    wanted = np.array([rows * share for share in shares.values()])
    counts = np.floor(wanted + 1e-6).astype(int)
    # The largest remainders get what rounding down has left over; the first of equal ones.
    left = rows - int(counts.sum())
    counts[np.argsort(-(wanted - counts), kind="stable")[:left]] += 1
    for (source, size), count in zip(sizes.items(), counts.tolist(), strict=True):
        if count > size and not repeat:
            most = min(math.floor(sizes[s] / share + 1e-6) for s, share in shares.items())
            raise HeadsmithError(
                f"{rows} rows take {count} of {source}, which has {size}; ask for at most {most} "
                "rows, give it less weight, or let rows repeat (--repeat)"
            )
        if not count:
            raise HeadsmithError(
                f"{rows} rows leave none for {source} at its weight; ask for more rows or leave it "
                "out"
            )
    return dict(zip(sizes, counts.tolist(), strict=True))


def _order(draws: _Draws, counts: dict[str, int]) -> list[int]:
    """Numbers in the spool of the rows to write: round after round of a source that repeats."""
    taken: list[tuple[int, int, int]] = []
    for source, drawn in draws.items():
        for place in range(counts[source]):
            lap, index = divmod(place, len(drawn))
            draw, number = drawn[index]
            # A row's later copies stand elsewhere than its first.
            key = int.from_bytes(blake2b(f"{lap}/{draw}".encode(), digest_size=8).digest(), "big")
            taken.append((key if lap else draw, number, lap))
    return [number for _, number, _ in sorted(taken)]
