"""Texts as words, and words as n-grams: what two conversations have in common.

Words are compared without case, accents' encoding, punctuation and white space. A character of a
script that is written without spaces is a word of its own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from zlib import crc32

import numpy as np

# Kana, Han and Hangul; then runs of any other letters, digits and underscores.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_MIX = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngram_hashes(parts: Sequence[str], n: int) -> np.ndarray:
    """One number for every `n` words in a row, uint64 [max(W - n + 1, 0)], in order.

    The same words give the same number in every process.
    """
    if len(parts) < n:
        return np.empty(0, dtype=np.uint64)
    ids = np.array([crc32(part.encode("utf-8", "replace")) for part in parts], dtype=np.uint64)
    count = len(parts) - n + 1
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(n):
        mixed = scramble(mixed * _MIX + ids[place : place + count])
    return mixed


def scramble(numbers: np.ndarray) -> np.ndarray:
    """Numbers uint64 [...] as others that look random, one to one (splitmix64's last steps)."""
    mixed = numbers + _MIX
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return result
