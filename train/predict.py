"""The tau that the unroll's own accuracies predict, to compare with what the verifier measures.

Per-step accuracies averaged over all rows predict too much: a pass never starts inside what the one
before it got right, so passes start at the harder places. Walking over each answer as decoding does
gives the verifier's number exactly, if the answer is the target's own greedy text: a chain drafted
at row i commits its right drafts and one more token, and the next one starts behind them
(spec/eagle.md 3.4, 8.7).
"""

from torch import Tensor


def walk(rows: Tensor, run: Tensor) -> tuple[int, int]:
    """Tokens committed and passes made over the answers of a packed row.

    rows int64 [n], ascending, are the rows of step 0; run int64 [n] how many steps in a row were
    right from each on. An answer is a stretch of consecutive rows; its first token came from the
    prefill and is not counted.
    """
    places, right = rows.tolist(), run.tolist()
    ends = [len(places)] * len(places)
    for i in range(len(places) - 2, -1, -1):
        ends[i] = ends[i + 1] if places[i + 1] == places[i] + 1 else i + 1
    committed = passes = i = 0
    while i < len(places):
        step = min(right[i] + 1, ends[i] - i)
        committed, passes, i = committed + step, passes + 1, i + step
    return committed, passes
