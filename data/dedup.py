"""De-duplication: one of several conversations that are the same, or nearly.

Exact duplicates have the same words. Near duplicates share at least `near` of their word n-grams
(Jaccard similarity: common ones / all of both). Candidates come from MinHash with banding (Broder
1997; Indyk and Motwani 1998); each is then compared in full, so nothing is dropped on an estimate.
The first of the source is the one that stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np

from headsmith.data.chats import Chat, Chats, line_of
from headsmith.data.lines import Spool, check_out
from headsmith.data.words import ngram_hashes, scramble, words
from headsmith.errors import HeadsmithError

By = Literal["conversation", "prompt"]
NGRAM = 3
_HASHES = 128
# How likely a pair that is just alike enough must be found at least.
_RECALL = 0.995
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Example:
    """A row that is left out, the row that stays for it, and how alike they are."""

    dropped: str
    kept: str
    alike: float


@dataclass(slots=True)
class Deduplicated:
    """What became of the rows; `left_out` by kind: exact, near."""

    read: int
    kept: int
    left_out: Counter[str] = field(default_factory=Counter)
    examples: list[Example] = field(default_factory=list)


def dedup(
    sources: Sequence[str],
    out: Path,
    *,
    near: float | None = 0.8,
    by: By = "conversation",
    chats: Chats | None = None,
    progress: Callable[[int], None] | None = None,
) -> Deduplicated:
    """Write the rows of `sources` without duplicates to the JSONL file `out`.

    `near` None drops exact duplicates only; `by` prompt compares what the user says. `chats` is
    what the sources were opened as. `progress` gets the rows read.
    """
    if near is not None and not 0 < near <= 1:
        raise HeadsmithError(f"near is {near}; it must be above 0, at most 1")
    check_out(out, sources)
    chats = chats or Chats(sources)
    with Spool(out) as spool:
        names: list[str] = []
        rows = _Rows()
        for chat in chats:
            rows.add(_words(chat, by), shingled=near is not None)
            names.append(chat.name)
            spool.add(line_of(chat.to_json()))
            if progress is not None:
                progress(len(names))
        twins = rows.exact()
        if near is not None:
            twins |= rows.near(near, twins)
        spool.write(number for number in range(len(names)) if number not in twins)
    result = Deduplicated(len(names), len(names) - len(twins))
    for number, (kept, alike, kind) in sorted(twins.items()):
        result.left_out[kind] += 1
        if result.left_out[kind] <= _EXAMPLES:
            result.examples.append(Example(names[number], names[kept], alike))
    return result


def _words(chat: Chat, by: By) -> list[str]:
    """What is compared; who speaks counts."""
    texts = []
    for message in chat.messages:
        if by == "conversation" or message["role"] == "user":
            texts += [f"{message['role']}:", *words(message["content"])]
    return texts


# A row that is left out -> the row that stays for it, how alike they are, which kind.
_Twins = dict[int, tuple[int, float, str]]


@dataclass(slots=True)
class _Rows:
    """What is remembered of every row: a digest of its words, its n-grams, its MinHash."""

    digests: list[bytes] = field(default_factory=list)
    shingles: list[np.ndarray] = field(default_factory=list)
    signatures: list[np.ndarray] = field(default_factory=list)
    _seeds: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._seeds = scramble(np.arange(_HASHES, dtype=np.uint64))[:, None]

    def add(self, text: Sequence[str], shingled: bool) -> None:
        # Words hold no white space, so that a space between them is unambiguous.
        digest = blake2b(" ".join(text).encode("utf-8", "replace"), digest_size=16)
        self.digests.append(digest.digest())
        if not shingled:
            return
        hashes = np.unique(ngram_hashes(text, min(NGRAM, len(text))))
        self.signatures.append(self._minhash(hashes))
        # Half of the bits, and half of the memory: chance collisions stay far below a percent.
        self.shingles.append(np.unique((hashes >> np.uint64(32)).astype(np.uint32)))

    def _minhash(self, hashes: np.ndarray) -> np.ndarray:
        """The least of the hashes under each of 128 orders of them, uint32 [128]."""
        least = scramble(hashes[None] ^ self._seeds).min(1)
        signature: np.ndarray = (least >> np.uint64(32)).astype(np.uint32)
        return signature

    def exact(self) -> _Twins:
        """Rows whose words came before."""
        first: dict[bytes, int] = {}
        twins: _Twins = {}
        for number, digest in enumerate(self.digests):
            kept = first.setdefault(digest, number)
            if kept != number:
                twins[number] = (kept, 1.0, "exact")
        return twins

    def near(self, threshold: float, gone: _Twins) -> _Twins:
        """Rows that are nearly one that stays; those in `gone` are out already."""
        numbers = [number for number in range(len(self.digests)) if number not in gone]
        bands = list(self._bands(numbers, threshold))
        # By band and value: the rows that stay, of those that share it with another.
        staying: dict[tuple[int, int], list[int]] = {}
        twins: _Twins = {}
        for place, number in enumerate(numbers):
            keys = [(band, int(ids[place])) for band, ids in enumerate(bands) if ids[place] >= 0]
            others = sorted({other for key in keys for other in staying.get(key, ())})
            found = self._alike(number, others, threshold)
            if found is not None:
                twins[number] = (*found, "near")
                continue
            for key in keys:
                staying.setdefault(key, []).append(number)
        return twins

    def _bands(self, numbers: Sequence[int], threshold: float) -> Iterator[np.ndarray]:
        """For each band of the signatures, int64 [rows]: which value a row has there, -1 where no
        other row has it.
        """
        if not numbers:
            return
        signatures = np.stack([self.signatures[number] for number in numbers])
        width = band_width(threshold)
        for start in range(0, _HASHES - width + 1, width):
            band = np.ascontiguousarray(signatures[:, start : start + width])
            values = band.view(np.dtype((np.void, band.shape[1] * 4))).ravel()
            _, ids, counts = np.unique(values, return_inverse=True, return_counts=True)
            yield np.where(counts[ids] > 1, ids, -1)

    def _alike(
        self, number: int, others: Sequence[int], threshold: float
    ) -> tuple[int, float] | None:
        """The first of `others` that shares enough, and how much it shares."""
        own = self.shingles[number]
        for other in others:
            theirs = self.shingles[other]
            # The shorter over the longer bounds the similarity, and costs nothing.
            if min(len(own), len(theirs)) < threshold * max(len(own), len(theirs)):
                continue
            common = len(np.intersect1d(own, theirs, assume_unique=True))
            alike = common / (len(own) + len(theirs) - common)
            if alike >= threshold:
                return other, alike
        return None


def band_width(threshold: float) -> int:
    """Hashes a band: as many as still find a pair that is alike by `threshold` 99.5 times in 100.

    A band agrees with probability threshold ** width, and one of 128 // width bands is enough.
    """
    for width in range(_HASHES // 2, 1, -1):
        missed = (1 - threshold**width) ** (_HASHES // width)
        if 1 - missed >= _RECALL:
            return width
    return 1
