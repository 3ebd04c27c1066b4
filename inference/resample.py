"""The cluster bootstrap: whole conversations are drawn with replacement.

Turns of one conversation correlate, and passes of one answer more so, which is why neither is
drawn by itself (spec/verifier.md 6.5). A ratio such as tau is taken of each draw's sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from headsmith.inference.records import Steps

CONFIDENCE = 0.95
RESAMPLES = 2000
# Numbers drawn at once: blocks bound the memory.
_BLOCK = 4_000_000


def cluster_counts(steps: Sequence[Steps]) -> dict[str, list[int]]:
    """[committed, passes] of each conversation that has a pass, by its name."""
    clusters: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in steps:
        if record.passes:
            cluster = clusters[record.conversation]
            cluster[0] += sum(one.committed for one in record.passes)
            cluster[1] += len(record.passes)
    return dict(clusters)


def drawn_sums(
    counts: np.ndarray, *, seed: int, draws: int = RESAMPLES, size: int | None = None
) -> np.ndarray:
    """Sums [draws, columns] over `size` rows of `counts` [clusters, columns], drawn again each
    time; `size` None draws as many as there are.
    """
    random = np.random.default_rng(seed)
    clusters = len(counts)
    drawn = clusters if size is None else size
    block = max(1, _BLOCK // drawn)
    sums = [
        counts[random.integers(clusters, size=(min(block, draws - start), drawn))].sum(axis=1)
        for start in range(0, draws, block)
    ]
    return np.concatenate(sums)


def interval(values: np.ndarray, confidence: float = CONFIDENCE) -> list[float]:
    """The percentile interval [lo, hi] of bootstrap values."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return [float(low), float(high)]
