"""Rows of training data that hold what is measured on: found by n-grams, shown, left out.

A row overlaps a prompt when `ngram` words in a row of the prompt stand in one of its messages. A
prompt of fewer words must stand there whole. A prompt of fewer than `SHORTEST` words is no
evidence of anything and is not looked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headsmith.data.chats import SHIPPED, Chat, Chats, line_of
from headsmith.data.lines import Spool, check_out
from headsmith.data.words import ngram_hashes, words
from headsmith.errors import HeadsmithError

NGRAM = 8
SHORTEST = 4
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Example:
    """A row, the prompt that it overlaps, and words that both have."""

    row: str
    prompt: str
    shared: str


@dataclass(slots=True)
class Overlap:
    """What was found; `by_prompts` counts rows by the source of the prompts, `by_prompt` by the
    prompt. `too_short` prompts were not looked for.
    """

    read: int = 0
    overlapping: int = 0
    prompts: int = 0
    too_short: int = 0
    by_prompts: Counter[str] = field(default_factory=Counter)
    by_prompt: Counter[str] = field(default_factory=Counter)
    examples: list[Example] = field(default_factory=list)


def overlap(
    sources: Sequence[str],
    against: Sequence[str] = (SHIPPED,),
    out: Path | None = None,
    *,
    ngram: int = NGRAM,
    chats: Chats | None = None,
    progress: Callable[[int], None] | None = None,
) -> Overlap:
    """Find the rows of `sources` that overlap the prompts `against`; with `out`, write the others.

    Of conversations in `against` the user's messages count. `default` there are the evaluation
    prompts that the package ships. `progress` gets the rows read.
    """
    if ngram < SHORTEST:
        raise HeadsmithError(f"ngram is {ngram}; fewer than {SHORTEST} words in a row say nothing")
    if out is not None:
        check_out(out, [*sources, *against])
    chats = chats or Chats(sources)
    found = Overlap()
    index = _Index(ngram)
    for prompt in Chats(against):
        found.prompts += 1
        found.too_short += not index.add(prompt)
    if out is None:
        _search(chats, index, found, lambda chat: None, progress)
        return found
    with Spool(out) as clean:
        _search(chats, index, found, lambda chat: clean.add(line_of(chat.to_json())), progress)
        clean.write()
    return found


def _search(
    chats: Iterable[Chat],
    index: _Index,
    found: Overlap,
    keep: Callable[[Chat], object],
    progress: Callable[[int], None] | None,
) -> None:
    for chat in chats:
        found.read += 1
        hits = index.find(chat)
        if not hits:
            keep(chat)
        else:
            found.overlapping += 1
            found.by_prompts.update({prompt.source for prompt, _ in hits})
            found.by_prompt.update({prompt.name for prompt, _ in hits})
            if len(found.examples) < _EXAMPLES:
                prompt, shared = hits[0]
                found.examples.append(Example(chat.name, prompt.name, shared))
        if progress is not None:
            progress(found.read)


@dataclass(slots=True)
class _Index:
    """The n-grams of all prompts, by their length: that of short prompts is their own."""

    ngram: int
    prompts: list[Chat] = field(default_factory=list)
    _of: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    _known: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, prompt: Chat) -> bool:
        """Takes a prompt in; False when no text of it is long enough."""
        self._known.clear()
        number = len(self.prompts)
        self.prompts.append(prompt)
        used = False
        for text in prompt.asked():
            parts = words(text)
            if len(parts) < SHORTEST:
                continue
            used = True
            n = min(self.ngram, len(parts))
            for value in ngram_hashes(parts, n).tolist():
                owners = self._of[n].setdefault(value, [])
                if number not in owners[-1:]:
                    owners.append(number)
        return used

    def find(self, chat: Chat) -> list[tuple[Chat, str]]:
        """The prompts that a chat overlaps, each with the first words that they share."""
        hits: dict[int, str] = {}
        for message in chat.messages:
            parts = words(message["content"])
            for n, owners in self._of.items():
                hashes = ngram_hashes(parts, n)
                for place in self._known_places(hashes, n):
                    for number in owners[int(hashes[place])]:
                        hits.setdefault(number, " ".join(parts[place : place + n]))
        return [(self.prompts[number], shared) for number, shared in sorted(hits.items())]

    def _known_places(self, hashes: np.ndarray, n: int) -> list[int]:
        """Where in `hashes` [N] n-grams of prompts are."""
        if n not in self._known:
            self._known[n] = np.sort(np.fromiter(self._of[n], dtype=np.uint64))
        known = self._known[n]
        nearest = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        return [int(place) for place in np.flatnonzero(known[nearest] == hashes)]
